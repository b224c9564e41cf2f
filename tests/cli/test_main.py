import signal
import subprocess
import sys
import types

import pytest

from dspark_jax.cli import main as cli
from dspark_jax.core.signals import keeping


def test_help_lists_every_verb_without_importing_one():
    code = (
        "import sys; from dspark_jax.cli.main import main\n"
        "try: main(['--help'])\nfinally: assert 'jax' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "data" in shown.stdout
    assert "Make training data" in shown.stdout


def test_an_unknown_verb_and_none_at_all_are_usage_errors(capsys):
    for argv in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.fixture
def verb(monkeypatch):
    """Makes `dspark data` do what it is given."""

    def install(act):
        module = types.ModuleType("dspark_jax.cli.data")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
        module.run = act
        monkeypatch.setitem(sys.modules, "dspark_jax.cli.data", module)

    return install


def fail(error):
    def act(args):
        raise error

    return act


def test_a_verb_gets_its_flags_and_its_exit_code_is_returned(verb):
    verb(lambda args: args.number)
    assert cli.main(["data", "--number", "5"]) == 5
    assert cli.main(["data"]) == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("the seed is odd"), "dspark data: the seed is odd\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.jsonl"),
            "dspark data: x.jsonl: No such file or directory\n",
        ),
        (ConnectionError("the Hub cannot be reached"), "dspark data: the Hub cannot be reached\n"),
    ],
)
def test_errors_the_user_can_mend_are_one_line_and_exit_code_2(verb, capsys, error, line):
    verb(fail(error))
    assert cli.main(["data"]) == 2
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


def test_faults_of_the_program_are_not_hidden(verb):
    verb(fail(RuntimeError("bug")))
    with pytest.raises(RuntimeError, match="bug"):
        cli.main(["data"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_without_a_traceback_and_with_what_the_verb_keeps(verb, capsys, number, heard_sigint):
    @keeping(lambda: "Half of it is kept.")
    def act(args):
        signal.raise_signal(number)

    verb(act)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["data"]) == 128 + number
    assert capsys.readouterr().err == "Interrupted. Half of it is kept.\n"
    assert signal.getsignal(signal.SIGTERM) is before
