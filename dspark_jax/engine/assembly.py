"""From flags to a loaded model and an engine over it; the server and the terminal chat start here."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.logs import NowAndThen
from dspark_jax.data.journal import require_writable
from dspark_jax.data.tokenizer import ChatTokenizer, load_tokenizer
from dspark_jax.decoding.confidence import Estimator
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.online import OnlineEstimator
from dspark_jax.decoding.rejection import Rule
from dspark_jax.decoding.scheduler import FixedLength
from dspark_jax.decoding.slots import DecodeSlots
from dspark_jax.drafters.base import Drafter, NoDrafter
from dspark_jax.engine.arguments import at_least
from dspark_jax.engine.calibrated import add_estimator_argument, load_estimator
from dspark_jax.engine.engine import Engine, Slots
from dspark_jax.engine.openai import Served
from dspark_jax.engine.refitting import RefittingSlots
from dspark_jax.engine.scheduling import (
    MEASURE,
    NO_FLAGS,
    Scheduling,
    Subject,
    add_scheduling_arguments,
    check_curve,
    check_scheduling,
    choose_scheduling,
    knows_chances,
    require_kept,
)
from dspark_jax.interop import huggingface
from dspark_jax.interop.deepspec_config import DrafterConfig
from dspark_jax.interop.drafter_kinds import abstract_drafter
from dspark_jax.interop.drafters import check_drafter, load_drafter
from dspark_jax.interop.smollm2 import WRITABLE_CACHE, cache_root
from dspark_jax.targets.model import Target, TargetSpec

DEFAULT_TARGET = "smollm2_135m"
NO_DRAFT = "none"

# A context longer than this is served when --max-len asks for it.
USUAL_LEN = 8192
# A round of every batch size up to these is compiled before the first request, which keeps them small on a CPU.
_CPU_BATCH, ACCELERATOR_BATCH = 4, 16
_PRETRAINED = Path(__file__).parent.parent / "pretrained"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A target with its drafter, tokenizer and the limits it is served with."""

    name: str
    target: Target
    drafter: Drafter
    tokenizer: ChatTokenizer
    stop_ids: frozenset[int]
    scheduling: Scheduling
    max_batch: int
    max_len: int
    dtype: str
    draft: Path | None = None
    """The drafter's directory."""
    fitted: Fitted | None = None
    """How confidences are read; None takes the drafter's head at its word."""

    @property
    def drafts(self) -> bool:
        return self.drafter.block_size > 0

    @property
    def estimator(self) -> Estimator | None:
        """`fitted`, for the slots."""
        return None if self.fitted is None else self.fitted.on_device()

    def served(self, engine: Engine) -> Served:
        """What requests to an engine of this model are checked against."""
        return Served(
            name=self.name,
            max_len=self.max_len,
            vocab_size=self.target.spec.vocab_size,
            max_choices=engine.capacity,
        )

    def engine(
        self,
        *,
        max_queue: int,
        drafting: bool = True,
        refit_every: int | None = None,
        say: Say = lambda line: None,
    ) -> Engine:
        """An engine that is not started yet; without `drafting` it decodes autoregressively.

        With `refit_every` confidences are fitted anew after so many rounds, to what these rounds showed. `say` hears
        now and then, while it starts, how many of its rounds are compiled.
        """
        now_and_then = NowAndThen(say)
        drafter = self.drafter if drafting else NoDrafter()
        scheduling = self.scheduling if drafting else Scheduling()
        online = None
        if refit_every is not None and self.drafts and drafting:
            start = self.fitted or Fitted.tempered(np.ones(self.drafter.block_size))
            online = OnlineEstimator(start, every=refit_every)

        def make_slots() -> Slots:
            slots = DecodeSlots(
                self.target,
                drafter,
                max_batch=self.max_batch,
                max_len=self.max_len,
                policy=scheduling.policy,
                curve=scheduling.curve,
                rule=scheduling.rule,
                # Reading confidences costs a little; only policies that look at them pay it.
                estimator=None if isinstance(scheduling.policy, FixedLength) else self.estimator,
                dtype=jnp.dtype(self.dtype),
                watch=lambda done, total: now_and_then(f"{done} of {total} kinds of round are compiled ..."),
            )
            return slots if online is None else RefittingSlots(slots, online)

        return Engine(
            make_slots,
            detokenizer=self.tokenizer.stream,
            stop_ids=self.stop_ids,
            max_batch=self.max_batch,
            max_queue=max_queue,
            rehearsal=self._usual_prompt(),
        )

    def _usual_prompt(self) -> tuple[int, ...]:
        """A chat of ordinary length; nothing where the model has no chat template."""
        content = "Hello! What can you tell me about the weather in the mountains today? " * 3
        try:
            prompt = self.tokenizer.encode_chat([{"role": "user", "content": content}])
        except ValueError:
            return ()
        return tuple(prompt[: self.max_len - 1])


def add_model_arguments(parser: argparse.ArgumentParser, *, scheduling: bool = True) -> None:
    """The flags that `load_model` reads, but for max_batch, which is the caller's to offer or to set.

    Without `scheduling` every draft is verified.
    """
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="NAME|DIR|HUB_ID",
        help="the model to serve: %(default)s (fetched once), a Hugging Face directory, or a Hub id",
    )
    parser.add_argument(
        "--draft",
        metavar="DIR|HUB_ID|none",
        help="the drafter; by default the one shipped for the target, if there is one; 'none' decodes without drafts",
    )
    parser.add_argument(
        "--max-len",
        type=at_least(2),
        metavar="N",
        help=f"tokens a request may hold, prompt and answer (by default the target's context, at most {USUAL_LEN})",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="by default float32 on a CPU and bfloat16 on an accelerator"
    )
    add_estimator_argument(parser)
    if scheduling:
        add_scheduling_arguments(parser)
    else:
        parser.set_defaults(**NO_FLAGS)


def load_model(args: argparse.Namespace, say: Say) -> LoadedModel:
    """Loads what the flags name. Raises ValueError or OSError, each with a sentence for the user."""
    draft = _drafter_directory(args.draft, args.target, say)
    directory = huggingface.resolve(args.target)
    spec = huggingface.read_spec(directory)
    max_len = min(spec.max_len, USUAL_LEN) if args.max_len is None else args.max_len
    if max_len > spec.max_len:
        raise ValueError(f"--max-len {max_len} is more than the target's context of {spec.max_len} tokens")
    # All that can be wrong with the drafter is said before the target's weights are read.
    draft_config = fitted = None
    if draft is not None:
        draft_config = check_drafter(draft, spec)
        fitted = load_estimator(args.estimator, draft, draft_config.block_size, say)
    confident = knows_chances(draft_config, calibrated=fitted is not None)
    policy = check_scheduling(args, block=0 if draft_config is None else draft_config.block_size, confident=confident)
    if args.step_curve == MEASURE:
        require_kept()
    on_cpu = jax.default_backend() == "cpu"
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    if draft_config is not None:
        check_curve(args, policy, lambda: _fingerprint(spec, draft_config, dtype, Rule(args.rule)))
    say(f"Loading the target from {directory} ({dtype}) ...")
    target = huggingface.load_target(directory, dtype=jnp.dtype(dtype))
    tokenizer = load_tokenizer(directory)
    drafter: Drafter = NoDrafter()
    if draft is not None:
        say(f"Loading the drafter from {draft} ...")
        drafter = load_drafter(draft, dtype=jnp.dtype(dtype), target=target)
    stop_ids = huggingface.stop_ids(directory)
    if not stop_ids and tokenizer.eos_id is not None:
        stop_ids = frozenset({tokenizer.eos_id})
    max_batch = args.max_batch or (_CPU_BATCH if on_cpu else ACCELERATOR_BATCH)
    scheduling = choose_scheduling(
        args,
        Subject(target=target, drafter=drafter, dtype=dtype, confident=confident),
        max_batch=max_batch,
        max_len=max_len,
        say=say,
    )
    return LoadedModel(
        name=_served_name(args.target, directory),
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        scheduling=scheduling,
        max_batch=max_batch,
        max_len=max_len,
        dtype=dtype,
        draft=draft,
        fitted=fitted,
    )


def remember_compilations(say: Say) -> None:
    """Compiled programs are kept in the user's cache, so that only the first start is slow."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    directory = cache_root() / "compiled"
    try:
        require_writable(directory, WRITABLE_CACHE)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"Compiled programs are not kept: {error}.")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def shipped_drafter(target: str) -> Path | None:
    """The directory of the drafter that comes with the package for this target."""
    shipped = _PRETRAINED / DEFAULT_TARGET
    known = target in huggingface.DEFAULT_TARGET_NAMES and (shipped / "config.json").is_file()
    return shipped if known else None


def _drafter_directory(draft: str | None, target: str, say: Say) -> Path | None:
    """The drafter's directory; None where it is to decode without."""
    if draft == NO_DRAFT:
        say("Decoding without a drafter, as --draft none asks.")
        return None
    if draft is not None:
        return huggingface.resolve(draft)
    if (shipped := shipped_drafter(target)) is not None:
        return shipped
    say(f"No drafter is shipped for {target}: decoding without one. Give one with --draft.")
    return None


def _fingerprint(spec: TargetSpec, drafter: DrafterConfig, dtype: str, rule: Rule) -> Fingerprint:
    return Fingerprint.expected(spec, abstract_drafter(drafter, jnp.dtype(dtype)), dtype=dtype, rule=rule)


def _served_name(target: str, directory: Path) -> str:
    if Path(target).expanduser().is_dir():
        return directory.resolve().name
    return target
