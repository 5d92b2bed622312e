"""`mpitrain completion`: a script that completes the command's words in a shell, made from the command's own parser.

Invariants: the script holds one table, of what may follow where. A *place* is the words of a command, `data pack`; the
command itself is the place `mpitrain`. `commands PLACE` are the words that lead to another place, `at PLACE WORD` is
that place, `options PLACE` and `values PLACE OPTION` are what their names say. An answer may have `@files` and
`@folders` among its words. bash and zsh share the functions that look it up.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from mpitrain.cli.common.options import command, option
from mpitrain.system.saying import hand_out

_DESCRIPTION = """\
Print a script that completes commands, options and values of mpitrain in a
shell. It holds what this version knows."""

_EPILOG = """\
for good:
  bash  echo 'source <(mpitrain completion bash)' >> ~/.bashrc
  zsh   echo 'source <(mpitrain completion zsh)' >> ~/.zshrc, after compinit
  fish  mpitrain completion fish > ~/.config/fish/completions/mpitrain.fish

examples:
  mpitrain completion bash > mpitrain.bash"""

_ROOT = "mpitrain"
_FOLDERS = ("DIR", "RUN_DIR", "PACK", "DEST")

_LOOK_UP = """\
_mpitrain_answer() { # THE WORD THAT IS TYPED, AND THOSE BEFORE IT
    local current=$1 place=mpitrain values='' next word
    shift 2
    for word; do
        if [ -n "$values" ]; then
            values=''
        elif [ "${word#-}" != "$word" ]; then
            values=$(_mpitrain_known values "$place" "$word")
        elif next=$(_mpitrain_known at "$place" "$word"); [ -n "$next" ]; then
            place=$next
        fi
    done
    if [ -n "$values" ]; then
        echo "$values"
    elif [ "${current#-}" != "$current" ]; then
        _mpitrain_known options "$place"
    else
        _mpitrain_known commands "$place"
    fi
}
"""

_BASH = """\
_mpitrain() {
    local current=${COMP_WORDS[COMP_CWORD]} before=() word
    for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
        [[ $word == = ]] || before+=("$word") # bash takes --option=value apart
    done
    [[ $current != = ]] || current=
    COMPREPLY=()
    for word in $(_mpitrain_answer "$current" "${before[@]}"); do
        case $word in
            @files) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current") ;;
            @folders) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$current") ;;
            "$current"*) COMPREPLY+=("$word") ;;
        esac
        [[ $word != @* ]] || compopt -o filenames 2>/dev/null
    done
}
complete -F _mpitrain mpitrain
"""

_ZSH = """\
_mpitrain() {
    local -a before known
    before=("${(@)words[1,CURRENT-1]}")
    if [[ $PREFIX == -*=* ]]; then
        before+=("${PREFIX%%=*}")
        compset -P '*='
    fi
    known=(${=$(_mpitrain_answer "$PREFIX" "${(@)before}")})
    if (( ${known[(Ie)@files]} )); then _files; fi
    if (( ${known[(Ie)@folders]} )); then _files -/; fi
    compadd -- ${known:#@*}
}
if [[ ${funcstack[1]} == _mpitrain ]]; then _mpitrain "$@"; else compdef _mpitrain mpitrain; fi
"""

_FISH = """\
function _mpitrain_answer
    set -l current (commandline -ct)
    set -l words (commandline -opc) # without the word that is typed
    set -l place mpitrain
    set -l values
    for word in $words[2..-1]
        set -l next (_mpitrain_known at $place $word)
        if test -n "$values"
            set values
        else if string match -q -- '-*' $word
            set values (_mpitrain_known values $place $word)
        else if test -n "$next"
            set place $next
        end
    end
    set -l known (_mpitrain_known commands $place)
    set -l typed $current
    set -l option ''
    if test -n "$values"
        set known $values
    else if string match -q -- '-*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set known (_mpitrain_known values $place $parts[1])
        set option $parts[1]=
        set typed $parts[2]
    else if string match -q -- '-*' $current
        set known (_mpitrain_known options $place)
    end
    for word in (string split ' ' -- "$known")
        switch $word
            case @files
                string replace -r '^' -- "$option" (__fish_complete_path $typed)
            case @folders
                string replace -r '^' -- "$option" (__fish_complete_directories $typed '')
            case '*'
                echo -- $option$word
        end
    end
end
complete -c mpitrain -f -a '(_mpitrain_answer)'
"""


def add_parser(commands: Any) -> None:
    """Add `completion` to the command's subparsers."""
    parser = command(
        commands,
        "completion",
        "print a script that completes words in a shell",
        functools.partial(run_completion, commands),
        _DESCRIPTION,
        _EPILOG,
    )
    option(parser, "shell", "SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish"))


def run_completion(commands: Any, arguments: argparse.Namespace) -> None:
    """Print the script."""
    # names and options: no word of them needs more than quotes around it
    known = dict(_table(commands)).items()
    if arguments.shell == "fish":
        cases = "".join(f"        case '{at}'\n            echo '{words}'\n" for at, words in known)
        table = f'function _mpitrain_known\n    switch "$argv"\n{cases}    end\nend\n'
        hand_out(f"# Completes words of mpitrain in fish.\n{table}{_FISH}")
        return
    cases = "".join(f"        '{at}') echo '{words}' ;;\n" for at, words in known)
    table = f'_mpitrain_known() {{\n    case "$*" in\n{cases}    esac\n}}\n'
    first = "#compdef mpitrain" if arguments.shell == "zsh" else "# Completes words of mpitrain in bash."
    hand_out(f"{first}\n{table}{_LOOK_UP}{_BASH if arguments.shell == 'bash' else _ZSH}")


def _table(commands: Any) -> Iterator[tuple[str, str]]:
    """What may follow where, by question."""
    yield f"options {_ROOT}", "-h --help --version"
    yield from _below(_ROOT, commands.choices, {})
    # a command that every rank runs, or a script
    inner = {name: name for name in commands.choices if name != "launch"}
    yield from _below("launch", inner, inner)
    yield "commands launch", " ".join([*inner, "@files"])


def _below(place: str, names: Any, places: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The words that lead from a place to others and, unless `places` has them, those others."""
    yield f"commands {place}", " ".join(names)
    for name in names:
        there = places.get(name) or (name if place == _ROOT else f"{place} {name}")
        yield f"at {place} {name}", there
        if name not in places:
            yield from _of(there, names[name])


def _of(place: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The words of one command."""
    options, words = [], ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from _below(place, action.choices, {})
            words = " ".join(action.choices)
        elif not action.option_strings:
            words = words or _values(action)
        for name in action.option_strings:
            options.append(name)
            if action.nargs != 0:
                yield f"values {place} {name}", _values(action)
    yield f"options {place}", " ".join(options)
    yield f"commands {place}", words


def _values(action: argparse.Action) -> str:
    """What an argument or the value of an option may be."""
    if action.dest in ("strategy", "strategies"):
        from mpitrain.values import names

        return " ".join(names("strategy"))
    if action.dest in ("kind", "launcher"):
        from mpitrain.slurm import KINDS, LAUNCHERS

        return " ".join((*KINDS, "@files") if action.dest == "kind" else LAUNCHERS)
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    return "@folders" if action.metavar in _FOLDERS else "@files"
