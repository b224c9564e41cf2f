"""The whole server over a real (tiny) target and drafter."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from dspark_jax.core import logs
from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots, Sampling
from dspark_jax.engine.assembly import load_model
from dspark_jax.engine.launch import parse_arguments
from dspark_jax.engine.server import build_app


@pytest.fixture(scope="module")
def model(tiny_target_dir, tiny_drafter_dir):
    args = ["--target", str(tiny_target_dir), "--draft", str(tiny_drafter_dir), "--max-batch", "2", "--max-len", "120"]
    # Whatever the cache of whoever runs the tests holds.
    args += ["--step-curve", "none"]
    return load_model(parse_arguments(args), lambda message: None)


@pytest.fixture(scope="module")
def said():
    """What is said while the two servers of `urls` start."""
    return []


@pytest.fixture(scope="module")
def urls(model, run_server, said):
    """The same model served with and without its drafter."""
    with contextlib.ExitStack() as servers:
        urls = []
        servers.enter_context(pytest.MonkeyPatch.context()).setattr(logs, "_SECONDS_BETWEEN_LINES", 0.0)
        for drafting in (True, False):
            engine = model.engine(max_queue=8, drafting=drafting, say=said.append)
            app = build_app(engine, model.served(engine), model.tokenizer)
            engine.start()
            assert engine.wait_started()
            urls.append(servers.enter_context(run_server(app, engine)).url)
        yield urls


def ask(client, url, **fields):
    body = {"model": "llama_tiny", "prompt": "hello there", "max_tokens": 60, **fields}
    response = client.post(url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text(reply):
    return reply["choices"][0]["text"]


def test_how_far_compiling_is_is_said(urls, said):
    rounds = [line for line in said if line.endswith(" kinds of round are compiled ...")]
    assert rounds[0].startswith("1 of ")
    finished = [line for line in rounds if line.split()[0] == line.split()[2]]
    assert len(finished) == 2, "with drafts and without"


@pytest.mark.parametrize("prompt", ["hello there", "abc", "0123456789" * 5])
def test_greedy_text_is_that_of_the_target_alone(urls, client, prompt):
    drafted, plain = urls
    with_drafts = ask(client, drafted, prompt=prompt, temperature=0)
    without = ask(client, plain, prompt=prompt, temperature=0)
    assert text(with_drafts) == text(without)
    assert with_drafts["choices"][0]["finish_reason"] == without["choices"][0]["finish_reason"]
    details = with_drafts["usage"].pop("completion_tokens_details")
    assert details["accepted_prediction_tokens"] > 0, "nothing was accepted: the comparison says nothing"
    assert details["rejected_prediction_tokens"] > 0
    none = without["usage"].pop("completion_tokens_details")
    assert none["accepted_prediction_tokens"] == none["rejected_prediction_tokens"] == 0
    assert with_drafts["usage"] == without["usage"]


def test_a_seed_gives_the_same_text_alone_and_among_others(urls, client):
    url = urls[0]
    prompts = {seed: "x" * (3 * seed) for seed in range(1, 7)}

    def sampled(seed):
        return text(ask(client, url, prompt=prompts[seed], seed=seed, temperature=1.0, top_p=0.95))

    alone = {seed: sampled(seed) for seed in prompts}
    with ThreadPoolExecutor(6) as pool:
        assert dict(zip(prompts, pool.map(sampled, prompts), strict=True)) == alone
    assert len(set(alone.values())) == len(alone)


def test_choices_of_one_request_differ_and_repeat(urls, client):
    first, second = (ask(client, urls[0], n=3, seed=5) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    assert texts[0] == text(ask(client, urls[0], seed=5))


def test_token_ids_and_text_are_the_same_prompt(model, urls, client):
    ids = model.tokenizer.encode("hello there")
    assert text(ask(client, urls[0], prompt=ids, temperature=0)) == text(ask(client, urls[0], temperature=0))


def test_usage_counts_what_was_delivered(model, urls, client):
    for limit in range(1, 12):
        reply = ask(client, urls[0], temperature=0, max_tokens=limit)
        assert reply["usage"]["completion_tokens"] == limit
        assert reply["usage"]["prompt_tokens"] == len(model.tokenizer.encode("hello there"))


def test_the_whole_context_can_be_used(urls, client):
    reply = ask(client, urls[0], temperature=1.2, max_tokens=None, seed=1)
    usage = reply["usage"]
    if reply["choices"][0]["finish_reason"] == "length":
        assert usage["total_tokens"] == 120
    assert usage["total_tokens"] <= 120


def test_a_chat_goes_through_the_models_template(model, urls, client):
    body = {"model": "llama_tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
    reply = client.post(urls[0] + "/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == text(
        ask(client, urls[0], prompt="u:hi\na:", temperature=0, max_tokens=8)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_served_text_and_acceptance_are_those_of_offline_generation(model, urls, client, temperature):
    prompt = "the quick brown fox"
    reply = ask(client, urls[0], prompt=prompt, temperature=temperature, seed=7)
    slots = DecodeSlots(model.target, model.drafter, max_batch=1, max_len=model.max_len)
    job = Job(
        prompt=tuple(model.tokenizer.encode(prompt)),
        sampling=Sampling(temperature=temperature, seed=7),
        max_new_tokens=60,
        stop_ids=model.stop_ids,
    )
    (offline,) = generate(slots, [job])
    assert text(reply) == model.tokenizer.decode(offline.tokens)
    assert reply["choices"][0]["finish_reason"] == offline.finish
    details = reply["usage"]["completion_tokens_details"]
    judged = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert judged == offline.stats.verified > 0
    assert reply["usage"]["completion_tokens"] == len(offline.tokens)
