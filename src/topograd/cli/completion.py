"""`topograd completion`: commands and flags completed by the shell.

The shell asks `topograd completion words TYPED...` for what may come next, so that it is what the installed
version takes. Where a path or a text belongs, nothing is answered, and the shell completes files.
"""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

from topograd.cli.console import COMPLETE, parse_one_of
from topograd.cli.main import VERBS, run_command
from topograd.errors import TopogradError


@dataclass(frozen=True, kw_only=True)
class Bash:
    """Print the completion of bash; in ~/.bashrc: eval "$(topograd completion bash)" """

    SCRIPT: ClassVar[str] = """_topograd() {
    local typed="${COMP_WORDS[COMP_CWORD]}"
    local words="$(topograd completion words "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)"
    COMPREPLY=($(compgen -W "$words" -- "$typed"))
}
complete -o default -F _topograd topograd"""


@dataclass(frozen=True, kw_only=True)
class Zsh:
    """Print the completion of zsh; in ~/.zshrc behind compinit: eval "$(topograd completion zsh)" """

    SCRIPT: ClassVar[str] = """_topograd() {
    local -a answers
    answers=(${(f)"$(topograd completion words ${words[2,CURRENT-1]} 2>/dev/null)"})
    (( $#answers )) && compadd -a answers || _files
}
compdef _topograd topograd"""


@dataclass(frozen=True, kw_only=True)
class Fish:
    """Print the completion of fish, for ~/.config/fish/completions/topograd.fish"""

    SCRIPT: ClassVar[str] = (
        "complete -c topograd -a '(topograd completion words (commandline -opc)[2..] 2>/dev/null)'"
    )


_SHELLS: dict[str, type[Bash | Zsh | Fish]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def run(argv: list[str]) -> int:
    """Print a script, or the words that may follow those that are typed, and return the exit code."""
    if argv[:1] != ["words"]:
        print(parse_one_of(_SHELLS, argv, "completion").SCRIPT)
    elif len(argv) == 1:
        print("\n".join(VERBS))
    elif argv[1] in VERBS:
        with contextlib.suppress(TopogradError):  # what is typed so far may be wrong
            return run_command(argv[1], [*argv[2:], COMPLETE])
    return 0
