"""Output that is closed, full or ASCII, and Ctrl-C at any moment: one line or nothing, never a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [[sys.executable, "-m", "topograd"], [str(Path(sys.executable).with_name("topograd"))]]
SHOW = ["space", "show", "4,4"]


def shell(words: list[str], redirection: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command with a redirection of the shell."""
    script = f'exec "$@" {redirection}'
    return subprocess.run(["sh", "-c", script, "sh", *COMMANDS[0], *words], capture_output=True, check=False)


@pytest.mark.parametrize("words", [SHOW, [*SHOW, "--json"], ["--help"], ["space", "show", "--help"]])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(words: list[str], closed: str) -> None:
    done = shell(words, closed)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_refusal_is_one_with_closed_streams_too(closed: str) -> None:
    done = shell(["space", "show", "0"], closed)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == ("2>&-" not in closed)


def test_a_file_that_is_opened_later_never_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Descriptor 1 would be the next file: what is printed must not end up in it."""
    code = (
        "import sys; from topograd.cli.main import main; main(['--version']);"
        "file = open(sys.argv[1], 'w'); assert file.fileno() > 2; print('lost')"
    )
    path = tmp_path / "kept"
    script = 'exec "$@" <&- >&-'
    subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code, str(path)], check=True)
    assert path.read_text() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [SHOW, [*SHOW, "--json"], ["--help"]])
def test_a_full_disk_behind_the_output_is_one_line(words: list[str]) -> None:
    done = shell(words, ">/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith(b"topograd: ")
    assert b"No space left on device" in done.stderr
    assert b"output" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "words", [SHOW, ["space", "show", "é"], ["space", "--é"], ["space", "show", "--help"]]
)
def test_what_ascii_cannot_show_is_escaped(words: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([*COMMANDS[0], *words], capture_output=True, env=environment, check=False)
    assert done.returncode in (0, 2)
    assert (done.stdout + done.stderr).isascii()
    if any("é" in word for word in words):
        assert rb"\xe9" in done.stderr
        assert done.stderr.count(b"\n") == 1
    else:
        assert done.stderr == b""


def test_a_name_that_is_no_unicode_is_escaped(tmp_path: Path) -> None:
    done = subprocess.run([*COMMANDS[0], "eval", b"no\xffrun"], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"topograd: there is no model at no\\udcffrun")


@pytest.mark.parametrize("command", COMMANDS, ids=["module", "script"])
@pytest.mark.parametrize(
    "moment", ["topograd.cli", "topograd.errors", "tyro", "rich.table", "torch._C", "torch"]
)
def test_ctrl_c_during_imports_is_one_line(command: list[str], moment: str) -> None:
    """SIGINT as soon as a module has been imported; Python itself says when."""
    process = subprocess.Popen(
        [*command, "bench", "decode"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        if not line.startswith(b"import time:"):
            said.append(line)
        elif line.split(b"|")[-1].strip().decode() == moment:
            process.send_signal(signal.SIGINT)
    process.stderr.close()
    assert said == [b"topograd: interrupted\n"]
    assert process.wait() in (130, -signal.SIGINT), "a shell calls both 130"


IGNORING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_the_tests_do_not_depend_on_the_signals_that_they_inherit() -> None:
    """Under nohup, in the background and in some CI systems SIGINT is ignored, and children inherit that."""
    test = f"{Path(__file__)}::{test_ctrl_c_during_imports_is_one_line.__name__}[topograd.errors-module]"
    command = [sys.executable, "-c", IGNORING, "-m", "pytest", "-p", "no:cacheprovider", test]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
