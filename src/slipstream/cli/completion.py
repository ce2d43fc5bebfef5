"""`slipstream completion SHELL`: the script that makes a shell complete commands, options, keys and their values.

The scripts ask `slipstream __complete LINE`, which prints what the last word of the line may become, one a line.
"""

from __future__ import annotations

from pathlib import Path

import typer

from slipstream.errors import UserError

SCRIPTS = {
    "bash": """_slipstream() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##* }" cut=""
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && cut="${word%%=*}="
    COMPREPLY=($(slipstream __complete "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _slipstream slipstream
""",
    "zsh": """#compdef slipstream
_slipstream() {
    local -a found
    found=("${(@f)$(slipstream __complete "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    compadd -Q -S '' -- "${found[@]}"
}
compdef _slipstream slipstream
""",
    "fish": """complete -c slipstream -f -a '(slipstream __complete (commandline -cp) 2>/dev/null)'
""",
}


def completion(
    shell: str = typer.Argument(help="bash, zsh or fish."),
) -> None:
    """Print a shell's completion script. For bash: add `eval "$(slipstream completion bash)"` to ~/.bashrc."""
    if shell not in SCRIPTS:
        raise UserError(f"There is no completion for '{shell}'. Choose {', '.join(SCRIPTS)}.")
    print(SCRIPTS[shell], end="")


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become."""
    from slipstream.cli import COMMANDS

    words = line.split(" ")
    before, last = [word for word in words[1:-1] if word], words[-1]
    if not before:
        return [name for name in [*COMMANDS, "--help", "--version"] if name.startswith(last)]
    if before[0] not in COMMANDS:
        return []
    found: list[str] = []
    if last.startswith("-") or before[0] not in ("train", "config"):
        found = [option for option in _options(before) if option.startswith(last)]
    if not last.startswith("-") and before[0] in ("train", "config", "study", "bench"):
        found += _settings(last)
    return sorted(found) or ([] if last.startswith("-") else _paths(last))


def _options(before: list[str]) -> list[str]:
    """The options of a command, or its subcommands and options."""
    from slipstream.cli import command as command_of

    group = command_of(before[0])
    commands = getattr(group, "commands", {})
    command = commands.get(before[1], group) if len(before) > 1 else group
    options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    return [*options, "--help", *(commands if command is group else ())]


def _settings(last: str) -> list[str]:
    """Keys, or the values of one that has a choice of them."""
    from slipstream.config import describe
    from slipstream.models.sizes import PRESETS
    from slipstream.optimizers import CORRECTION_NAMES, OPTIMIZERS

    key, equals, _ = last.partition("=")
    if not equals:
        return [f"{one.name}=" for one in describe() if one.name.startswith(last)]
    choices = {"model.preset": PRESETS, "optim.name": OPTIMIZERS, "optim.correction": CORRECTION_NAMES}
    known = next((one for one in describe() if one.name == key), None)
    values = list(choices.get(key, ()))
    if known is not None and not values:
        kinds = "true | false" if known.type == "bool" else known.type
        values = kinds.split(" | ") if " | " in kinds else []
    found = [f"{key}={value}" for value in values if f"{key}={value}".startswith(last)]
    return found or [f"{key}={path}" for path in _paths(last.partition("=")[2])]


def _paths(last: str) -> list[str]:
    """Files and folders; a folder ends in a slash."""
    head, slash, tail = last.rpartition("/")
    start = head + slash
    try:
        inside = sorted(Path(start or ".").expanduser().iterdir())
    except OSError:
        return []
    return [
        f"{start}{path.name}{'/' if path.is_dir() else ''}"
        for path in inside
        if path.name.startswith(tail) and (tail.startswith(".") or not path.name.startswith("."))
    ]
