"""The completion scripts in the shells that read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from keepdim.cli import arguments, completion

BASH = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_keepdim
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def scripts(tmp_path: Path) -> dict[str, Path]:
    """A file for each shell."""
    paths = {shell: tmp_path / f"keepdim.{shell}" for shell in completion.SHELLS}
    for shell, path in paths.items():
        path.write_text(completion.script(shell, arguments.parser()))
    return paths


@pytest.mark.parametrize(
    "words, expected",
    [
        (["ins"], ["inspect"]),
        (["--"], ["--help", "--version"]),
        (["lower", "m.py:make", "--engine", ""], ["ggml", "mlx"]),
        (["inspect", "m.pte", "--v"], ["--verify"]),
        (["audit", "m.pte", "--allow", "wr"], ["wrong\\ numbers"]),
        (["completion", "z"], ["zsh"]),
        (["run", "mod"], [""]),  # then bash completes files
    ],
)
def test_bash_completes(words: list[str], expected: list[str], scripts: dict[str, Path]) -> None:
    """Commands, options and their values."""
    command = ["bash", "-c", BASH, "bash", str(scripts["bash"]), "keepdim", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


def test_every_command_and_option_is_completed(scripts: dict[str, Path]) -> None:
    """In every shell."""
    for command in completion.commands(arguments.parser()):
        flags = [f for o in command.options for f in o.flags if f.startswith("--")]
        for shell, path in scripts.items():
            text = path.read_text()
            assert command.name in text and all((f"-l {f[2:]}" if shell == "fish" else f) in text for f in flags)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_the_script(shell: str, scripts: dict[str, Path]) -> None:
    """Without an error; fish says what it would complete."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    if shell == "fish":
        code = f"source {scripts[shell]}; complete -C 'keepdim ins'; complete -C 'keepdim lower --engine '"
        done = subprocess.run([shell, "--no-config", "-c", code], capture_output=True, text=True, timeout=60)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["inspect", "ggml", "mlx"]
