"""Completion scripts for bash, zsh and fish, generated from the parser; files are completed where no choices exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """An argument of a command; a positional has no flags."""

    flags: Sequence[str]
    text: str
    choices: Sequence[str]
    takes_value: bool


class Command(NamedTuple):
    """A command and its arguments."""

    name: str
    text: str
    options: list[Option]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for a shell of SHELLS.

    >>> print(script("bash", argparse.ArgumentParser("keepdim")).splitlines()[0])
    # bash completion of keepdim. In ~/.bashrc: eval "$(keepdim completion bash)"
    """
    return "\n".join(SHELLS[shell](list(commands(parser)))) + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """The commands of a parser in their order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {a.dest: a.help or "" for a in action._choices_actions}
            for name, sub in action.choices.items():
                yield Command(name, texts[name], [_option(a) for a in sub._actions])


def _option(a: argparse.Action) -> Option:
    return Option(a.option_strings, a.help or "", [str(c) for c in a.choices or ()], a.nargs != 0)


# ---------------------------------------------------------------- bash
def _bash(known: list[Command]) -> Iterator[str]:
    yield '# bash completion of keepdim. In ~/.bashrc: eval "$(keepdim completion bash)"'
    yield "_keepdim() {"
    yield "    local IFS=$'\\n' words= cur=${COMP_WORDS[COMP_CWORD]}"
    yield '    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in'
    yield f"        1\\ *) words={_lines([*(c.name for c in known), '--help', '--version'])} ;;"
    for c in known:
        for o in (o for o in c.options if o.choices):
            for flag in o.flags or ("*",):
                yield f"        *\\ {c.name}\\ {flag}) words={_lines(o.choices)} ;;"
    yield "    esac"
    yield "    if [[ -z $words && $cur == -* ]]; then"
    yield '        case "${COMP_WORDS[1]}" in'
    for c in known:
        yield f"            {c.name}) words={_lines(f for o in c.options for f in o.flags)} ;;"
    yield "        esac"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield '    COMPREPLY=("${COMPREPLY[@]// /\\\\ }")'
    yield "}"
    yield "complete -o default -F _keepdim keepdim"


def _lines(words: Iterator[str] | Sequence[str]) -> str:
    return "$'" + "\\n".join(words) + "'"


# ---------------------------------------------------------------- zsh
def _zsh(known: list[Command]) -> Iterator[str]:
    yield "#compdef keepdim"
    yield '# zsh completion of keepdim. In ~/.zshrc, after compinit: eval "$(keepdim completion zsh)"'
    yield "_keepdim() {"
    yield "    if (( CURRENT == 2 )); then"
    described = " ".join(_quoted(f"{c.name}:{c.text}") for c in known)
    yield f"        local -a commands=({described})"
    yield "        _describe command commands"
    yield "        return"
    yield "    fi"
    yield "    local command=$words[2]"
    yield "    shift words"
    yield "    (( CURRENT-- ))"
    yield "    case $command in"
    for c in known:
        specs = " ".join(_quoted(spec) for o in c.options for spec in _zsh_specs(o))
        yield f"        {c.name}) _arguments {specs} ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ $funcstack[1] == _keepdim ]]; then _keepdim "$@"; else compdef _keepdim keepdim; fi'


def _zsh_specs(o: Option) -> Iterator[str]:
    words = " ".join(c.replace(" ", "\\ ") for c in o.choices)
    value = f": :({words})" if o.choices else ": :_files"
    text = re.sub(r"([\[\]:])", r"\\\1", o.text)
    for flag in o.flags:
        yield f"*{flag}[{text}]{value if o.takes_value else ''}"
    if not o.flags:
        yield f"*{value}"


# ---------------------------------------------------------------- fish
def _fish(known: list[Command]) -> Iterator[str]:
    yield "# fish completion of keepdim. Run: keepdim completion fish > ~/.config/fish/completions/keepdim.fish"
    first = "complete -c keepdim -n __fish_use_subcommand"
    yield f"{first} -f -l version -d 'print the version'"
    for c in known:
        yield f"{first} -f -a {c.name} -d {_quoted(c.text)}"
        for o in c.options:
            names = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in o.flags)
            words = _quoted(" ".join(f'"{w}"' if " " in w else w for w in o.choices))
            takes = f" -x -a {words}" if o.choices else " -r" if o.takes_value and o.flags else ""
            if names or o.choices:
                seen = f"complete -c keepdim -n '__fish_seen_subcommand_from {c.name}'"
                yield f"{seen} {names}{takes} -d {_quoted(o.text)}".replace("  ", " ")


def _quoted(text: str) -> str:
    """In single quotes, for zsh and fish."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: dict[str, Callable[[list[Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

__all__ = ["SHELLS", "script"]
