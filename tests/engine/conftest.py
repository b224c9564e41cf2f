"""A scripted model behind the interface of the slots, a tokenizer of bytes, and a server on a loopback port."""

import codecs
import contextlib
import hashlib
import json
import shutil
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.decoding.slots import SlotRound
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.openai import Served
from dspark_jax.engine.runner import EngineServer
from dspark_jax.engine.server import build_app

GOLDEN = Path(__file__).parent.parent / "golden"
EOS = 0
MAX_LEN = 200


class ByteStream:
    """Incremental UTF-8."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids):
        return self._decoder.decode(bytes(ids))

    def flush(self):
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One id a byte; a chat is its roles and texts between marks."""

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages, add_generation_prompt=True):
        if any("refuse me" in message["content"] for message in messages):
            raise ValueError("roles must alternate")
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def stream(self):
        return ByteStream()


def scripted_text(prompt, sampling, size=400):
    """What the scripted model says: letters that depend on the prompt and, above temperature 0, on the seed."""
    key = repr((tuple(prompt), sampling.seed if sampling.temperature else None)).encode()
    digest = b"".join(hashlib.sha256(key + bytes([i])).digest() for i in range(size // 32 + 1))
    return bytes(97 + byte % 26 for byte in digest[:size])


@dataclass
class _Request:
    handle: int
    says: bytes
    at: int = 0
    rounds: int = 0


@dataclass
class ScriptedSlots:
    """The slots' interface over a script. Rounds bring 1 to 4 tokens, from up to 3 drafts.

    `script` overrides what is said to a prompt. While `gate` is clear no round happens, and while `door` is no
    admission. A round takes `pace` seconds. `failures` are raised by the next rounds (None lets one pass),
    `admission_failures` by the next admissions.
    """

    max_batch: int = 2
    max_len: int = MAX_LEN
    script: dict = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    door: threading.Event = field(default_factory=threading.Event)
    pace: float = 0.0
    failures: list = field(default_factory=list)
    admission_failures: list = field(default_factory=list)
    warm_up_failures: list = field(default_factory=list)

    def __post_init__(self):
        self.requests = {}
        self.handles = 0
        self.built = 0
        self.admitted = []
        self.ended_at = []
        self.largest_batch = 0
        self.changed = threading.Condition()
        self.asked = 0
        self.gate.set()
        self.door.set()

    def build(self):
        """What the engine calls for fresh slots."""
        self.built += 1
        self.requests = {}
        return self

    @property
    def free(self):
        return self.max_batch - len(self.requests)

    def warm_up(self):
        if self.warm_up_failures:
            raise self.warm_up_failures.pop(0)

    def admit_many(self, prompts, samplings):
        assert len(prompts) <= self.free
        self.asked += len(prompts)
        self.door.wait(10)
        if self.admission_failures:
            raise self.admission_failures.pop(0)
        return [self.admit(*request) for request in zip(prompts, samplings, strict=True)]

    def admit(self, prompt, sampling):
        assert 0 < len(prompt) < self.max_len
        with self.changed:
            handle, self.handles = self.handles, self.handles + 1
            said = self.script.get(bytes(prompt)) or scripted_text(prompt, sampling)
            self.requests[handle] = _Request(handle, said)
            self.admitted.append(tuple(prompt))
            self.changed.notify_all()
        return handle

    def release(self, handle):
        with self.changed:
            self.ended_at.append(self.requests.pop(handle).at)
            self.changed.notify_all()

    def step(self):
        self.gate.wait(10)
        time.sleep(self.pace)
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        self.largest_batch = max(self.largest_batch, len(self.requests))
        return [self._advance(request) for request in self.requests.values()]

    def _advance(self, request):
        count = (1, 4, 2, 3)[request.rounds % 4]
        tokens = request.says[request.at : request.at + count] or bytes([EOS])
        request.at += len(tokens)
        request.rounds += 1
        return SlotRound(
            handle=request.handle,
            tokens=tuple(tokens),
            proposed=3,
            verified=3,
            accepted=len(tokens) - 1,
            confidence=(1.0, 1.0, 1.0),
        )

    def wait_for(self, condition):
        """Blocks until a condition on these slots holds; it is looked at whenever a request comes or goes."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), 10)


@pytest.fixture
def make_engine():
    """Started engines over scripted slots; they end with the test."""
    engines = []

    def make(slots, *, max_queue=2, start=True, detokenizer=ByteStream, rehearsal=()):
        engine = Engine(
            slots.build,
            detokenizer=detokenizer,
            stop_ids={EOS},
            max_batch=slots.max_batch,
            max_queue=max_queue,
            rehearsal=rehearsal,
        )
        engines.append((engine, slots))
        if start:
            engine.start()
            engine.wait_started()
        return engine

    yield make
    for engine, slots in engines:
        slots.gate.set()
        slots.door.set()
        engine.abort()
        assert engine.join(10.0)


class Running:
    """A server in a thread."""

    def __init__(self, app, engine, *, grace):
        self.engine = engine
        self.said = []
        self.server = EngineServer(app, engine, grace=grace, say=self.said.append)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        # A connection made before the loop runs waits in the backlog instead of being refused.
        self.listener.listen()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    def stop(self):
        """What the first Ctrl-C does."""
        self.server.should_exit = True

    def join(self):
        self.thread.join(20.0)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(app, engine, *, grace=5):
    server = Running(app, engine, grace=grace)
    try:
        yield server
    finally:
        server.stop()
        server.join()


@pytest.fixture
def serve(make_engine):
    with contextlib.ExitStack() as servers:

        def start(slots=None, *, grace=5, max_queue=2, start_engine=True, **options):
            slots = ScriptedSlots() if slots is None else slots
            engine = make_engine(slots, max_queue=max_queue, start=start_engine)
            served = Served(name="tiny/model", max_len=slots.max_len, vocab_size=256, max_choices=engine.capacity)
            app = build_app(engine, served, ByteTokenizer(), **options)
            server = servers.enter_context(running(app, engine, grace=grace))
            servers.callback(slots.gate.set)
            return server

        yield start


@pytest.fixture
def client():
    with httpx.Client(timeout=20) as client:
        yield client


@pytest.fixture
def make_slots():
    return ScriptedSlots


@pytest.fixture(name="scripted_text")
def scripted_text_fixture():
    return scripted_text


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory):
    """The golden llama with a tokenizer: a model directory that can be served."""
    directory = tmp_path_factory.mktemp("targets") / "llama_tiny"
    shutil.copytree(GOLDEN / "targets" / "llama_tiny", directory)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    # One id a byte, and two-byte ids for the rest of the model's vocabulary.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"a{letter}" for letter in letters)]
    vocabulary |= {piece: i for i, piece in enumerate(pieces[:317], start=3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<eos>", "<bos>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}a:"
    config = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tiny_drafter_dir():
    return GOLDEN / "drafters" / "dspark_vanilla_llama"


@pytest.fixture(scope="session")
def run_server():
    """A context that runs an application over a started engine on a loopback port."""
    return running


@pytest.fixture
def byte_tokenizer():
    return ByteTokenizer()


@pytest.fixture(scope="session")
def wait_until():
    """Blocks until a condition holds that nobody announces; fails after ten seconds."""

    def wait(condition):
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("it did not happen in 10 s")

    return wait
