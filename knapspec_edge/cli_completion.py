"""Completion by the shell: what an option or argument may be, and the scripts for three shells.

Completing runs the program anew at each press of Tab, so nothing heavy may be imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from .cli_config import Command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]

VARIABLE = "_KNAPSPEC_EDGE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
# kinds of items: "file" and "dir" are click's, "gguf" is ours: folders and model files
_FILE, _FOLDER, _GGUF = "file", "dir", "gguf"

# Names with spaces or a tilde are quoted and expanded by the shell itself.
_BASH = r"""%(complete_func)s() {
    local IFS=$'\n' response completion type value
    local words=("${COMP_WORDS[@]}") at=$COMP_CWORD
    # bash takes --kv-type=q8 for three words
    if (( at > 1 )) && [[ ${words[at-1]} == "=" ]]; then
        unset "words[at-1]"
        (( at-- ))
    fi
    response=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$at \
        %(complete_var)s=bash_complete $1)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            file) compopt -o default;;
            dir) compopt -o dirnames;;
            gguf)
                compopt -o filenames
                value=${value/#\~\//$HOME/}
                COMPREPLY+=($(compgen -d -- "$value"))
                COMPREPLY+=($(compgen -f -X '!*.[gG][gG][uU][fF]' -- "$value"))
                ;;
            plain) COMPREPLY+=("$value");;
        esac
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = r"""#compdef %(prog_name)s
%(complete_func)s() {
    local -a values described response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
        %(complete_var)s=zsh_complete %(prog_name)s)}")
    [[ "$words[CURRENT]" == --*=* ]] && compset -P 1 '*='
    for type key descr in ${response}; do
        case $type in
            plain)
                if [[ "$descr" == "_" ]]; then
                    values+=("$key")
                else
                    described+=("${key//:/\\:}:$descr")
                fi;;
            dir) _path_files -/;;
            file) _path_files -f;;
            gguf) _path_files -g '*.(#i)gguf(-.)'; _path_files -/;;
        esac
    done
    [ -n "$described" ] && _describe -V unsorted described -U
    [ -n "$values" ] && compadd -U -V unsorted -a values
    return 0
}
setopt local_options extended_glob 2>/dev/null
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = r"""function %(complete_func)s
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \
        COMP_CWORD=(commandline -t) %(prog_name)s)
    for completion in $response
        set -l metadata (string split -m 1 "," -- $completion)
        switch $metadata[1]
            case dir
                __fish_complete_directories $metadata[2]
            case file
                __fish_complete_path $metadata[2]
            case gguf
                __fish_complete_path $metadata[2] | \
                    string match -r -i '^[^\t]*(?:/|\.gguf)(?:\t.*)?$'
            case plain
                echo $metadata[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""

# How each is installed, as the first comment of the script.
_INSTALL = {
    "bash": 'in ~/.bashrc: eval "$(knapspec-edge completion bash)"   (bash 4.4 or newer)',
    "zsh": 'in ~/.zshrc, behind compinit: eval "$(knapspec-edge completion zsh)"',
    "fish": "knapspec-edge completion fish > ~/.config/fish/completions/knapspec-edge.fish",
}


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [_item(incomplete, _FILE)]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [_item(incomplete, _FOLDER)]


def words_and_files(*words: str) -> Completer:
    """Some words, and else files."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [_item(word, "plain") for word in words if word.startswith(incomplete)]
        return [*found, _item(incomplete, _FILE)]

    return complete


def listed(*words: str) -> Completer:
    """Some words, separated by commas, each once."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        found = (word for word in words if word.startswith(last) and word not in given)
        return [_item(f"{before}{comma}{word}", "plain") for word in found]

    return complete


def model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the manifest, model files and folders."""
    from . import models

    names = [] if models.looks_like_path(incomplete) else model_names(ctx, param, incomplete)
    return [*names, _item(incomplete, _GGUF)]


def model_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from . import models

    names = (entry.name for entry in models.catalogue())
    return [_item(name, "plain") for name in names if name.startswith(incomplete)]


def fetched_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from . import models

    return [i for i in model_names(ctx, param, incomplete) if models.installed(i.value)]


def model_then_nothing(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The first of several arguments is a model, the next one a prompt."""
    return [] if _given(ctx, param) else model(ctx, param, incomplete)


def model_then_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    first = [] if _given(ctx, param) else model_names(ctx, param, incomplete)
    return [*first, _item(incomplete, _FILE)]


def _given(ctx: click.Context, param: click.Parameter) -> bool:
    return bool(ctx.params.get(param.name or ""))


def _item(value: str, kind: str) -> CompletionItem:
    from click.shell_completion import CompletionItem

    return CompletionItem(value, type=kind)


def register() -> None:
    """Put our scripts in the place of click's, whose files cannot be filtered."""
    from click import shell_completion as shells

    for name, base, template in (
        ("bash", shells.BashComplete, _BASH),
        ("zsh", shells.ZshComplete, _ZSH),
        ("fish", shells.FishComplete, _FISH),
    ):
        shells.add_completion_class(
            type(f"Our{base.__name__}", (base,), {"source_template": template}), name
        )


def asked() -> bool:
    """Whether a shell runs the program to complete a command line."""
    return VARIABLE in os.environ


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that makes the Tab key complete commands, options, models and files.

    \b
    Examples:
      eval "$(knapspec-edge completion bash)"
      eval "$(knapspec-edge completion zsh)"
      knapspec-edge completion fish > ~/.config/fish/completions/knapspec-edge.fish

    The first two go into ~/.bashrc or, behind compinit, into ~/.zshrc.
    """
    templates = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
    script = templates[shell] % {
        "complete_func": "_knapspec_edge_completion",
        "complete_var": VARIABLE,
        "prog_name": "knapspec-edge",
    }
    comment = f"# {_INSTALL[shell]}\n"
    first, rest = script.split("\n", 1)
    # zsh's own mark has to be the first line
    click.echo(f"{first}\n{comment}{rest}" if shell == "zsh" else f"{comment}{script}", nl=False)
