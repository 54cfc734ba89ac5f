"""Which words of a command are paceline's, which are torchrun's, which are the script's.

==============================================  ==========================================
``paceline VERB OPTIONS SCRIPT WORDS``          the words are the script's, as with torchrun
``paceline VERB SCRIPT OPTIONS``                or they are paceline's options, all of them
``paceline VERB SCRIPT OPTIONS -- WORDS``       what follows ``--`` is the script's, always
==============================================  ==========================================

The same for every verb that runs a script. What could be either is not guessed: after the
script, options beside words of its own, options of another verb, and what looks like a
misspelt option are refused, with the command that gives all words after the script to
the script, as torchrun does; a misspelt option is first spelt right. So is an option that is given
twice.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from paceline.errors import UsageError

_TORCHRUN = "paceline.torchrun"
_LIKENESS = 0.85
"""--wrkers is like --workers; --num-workers, which many scripts have, is not."""


@dataclass(frozen=True)
class Option:
    """*parameter*: what it sets, by which repeats are found; *words*: how many values
    follow it; *repeats*: whether it may be given more than once."""

    parameter: str
    words: int
    repeats: bool = False


@dataclass(frozen=True)
class Grammar:
    """What a verb knows. *torchrun*: asked for torchrun's options, once a word is nobody
    else's (it imports torch). *elsewhere*: options of other verbs, and whose they are.
    *script*: whether it runs one."""

    verb: str
    options: Mapping[str, Option]
    torchrun: Callable[[], Mapping[str, Option]] | None = None
    elsewhere: Mapping[str, str] | None = None
    script: bool = True


@dataclass
class Words:
    """A command, told apart."""

    own: list[str]
    torchrun: list[str]
    script: str | None
    arguments: list[str]


def tell_apart(words: Sequence[str], grammar: Grammar) -> Words:
    """Raises `UsageError` for what is refused: see above."""
    before, dashes, after = list(words), False, []
    if "--" in before:
        position = before.index("--")
        before, dashes, after = before[:position], True, before[position + 1 :]
    found = Words([], [], None, [])
    given: dict[str, str] = {}
    beside = False
    """Whether options stand after the script."""
    ahead: list[str] = []
    """What stands before the script."""
    while before:
        word = before.pop(0)
        name, equals, _ = word.partition("=")
        kind, option = _option(word, name, grammar)
        if option is not None:
            if not option.repeats and option.parameter in given:
                raise UsageError(_twice(name, given[option.parameter], found.script))
            given[option.parameter] = name
            beside = beside or found.script is not None
            into = found.own if kind == "own" else found.torchrun
            into.append(word)
            if option.words and not equals:
                into += before[: option.words]
                del before[: option.words]
        elif found.script is None and word.startswith("-"):
            raise UsageError(_unknown(name, grammar))
        elif found.script is None:
            found.script = word
            ahead = list(words[: len(words) - len(before) - len(after) - dashes - 1])
        else:
            found.arguments.append(word)
    mixed = found.arguments and (beside or dashes)
    if mixed or any(_suspicion(word, grammar) for word in found.arguments):
        suspect = next((w for w in found.arguments if _suspicion(w, grammar)), "")
        if dashes:
            ahead = [*found.torchrun, *found.own]
        said = [*ahead, str(found.script), "--"]
        rest = found.arguments if dashes else words[len(ahead) + 1 :]
        raise UsageError(
            _whose(found, suspect, [*said, *rest, *after], grammar)
            if not _near(suspect.partition("=")[0], grammar.options)
            else _misspelt(suspect, words, [*said, *rest, *after], grammar)
        )
    found.arguments += after
    return found


def _option(word: str, name: str, grammar: Grammar) -> tuple[str, Option | None]:
    if not word.startswith("-") or word == "-":
        return "", None
    if name in grammar.options:
        return "own", grammar.options[name]
    # Misspelt ones are answered without torch, whose import takes seconds.
    if grammar.torchrun is None or _near(name, grammar.options):
        return "", None
    return "torchrun", grammar.torchrun().get(name)


def _near(name: str, options: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=_LIKENESS)
    return near[0] if near else ""


def _suspicion(word: str, grammar: Grammar) -> str:
    """Why a word after the script may not be the script's, or nothing."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return ""
    if _near(name, grammar.options):
        return "."
    verb = (grammar.elsewhere or {}).get(name)
    return f", but one of paceline {verb}." if verb else ""


def _unknown(name: str, grammar: Grammar) -> str:
    near = _near(name, grammar.options)
    verb = (grammar.elsewhere or {}).get(name)
    found = f"unknown option {name!r} of paceline {grammar.verb}"
    if near:
        return f"{found}; did you mean {near!r}?"
    if verb:
        return f"{found}; paceline {verb} has it"
    if grammar.torchrun is not None:
        found += ": neither paceline's nor torchrun's"
    return f"{found}; a script's own options come after it" if grammar.script else found


def _twice(name: str, first: str, script: str | None) -> str:
    same = "" if name == first else f", first as {first}"
    own = "; if it is the script's own, it stands after --" if script else ""
    return f"{name} is given twice{same}: give it once{own}"


def _whose(found: Words, suspect: str, command: Sequence[str], grammar: Grammar) -> str:
    options = [w for w in found.arguments if w.startswith("-")]
    word = suspect or (options or found.arguments)[0]
    name = word.partition("=")[0]
    return (
        f"{name!r} is no option of paceline {grammar.verb}"
        f"{_suspicion(word, grammar) or '.'} The script's own arguments stand after --, and "
        "paceline's options before the script:\n"
        f"    paceline {grammar.verb} {shlex.join(command)}"
    )


def _misspelt(
    word: str, words: Sequence[str], command: Sequence[str], grammar: Grammar
) -> str:
    name, equals, value = word.partition("=")
    near = _near(name, grammar.options)
    right = [near + equals + value if one == word else one for one in words]
    return (
        f"unknown option {name!r} of paceline {grammar.verb}; did you mean {near!r}?\n"
        f"    paceline {grammar.verb} {shlex.join(right)}\n"
        f"If it is the script's own, it stands after --:\n"
        f"    paceline {grammar.verb} {shlex.join(command)}"
    )


class Command(TyperCommand):
    """A verb of paceline's."""

    passes_on = False
    """Whether torchrun's options are passed on."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = tell_apart(args, self._grammar(ctx))
        ctx.meta[_TORCHRUN] = words.torchrun
        if words.script is not None:
            rest = [words.script, *words.arguments]
            return super().parse_args(ctx, [*words.own, "--", *rest])
        wanted = any(p.required for p in self.params if p.name == "script")
        if wanted and not set(ctx.help_option_names).intersection(words.own):
            raise UsageError(
                f"expected a script: paceline {self.name} --workers 2 train.py"
            )
        return super().parse_args(ctx, words.own)

    def _grammar(self, ctx: Any) -> Grammar:
        elsewhere: dict[str, str] = {}
        verbs = {} if ctx.parent is None else ctx.parent.command.commands
        for name, command in verbs.items():
            if _runs_a_script(command):
                for option in _options(command, ctx):
                    elsewhere.setdefault(option, name)
        return Grammar(
            verb=str(self.name),
            options=_options(self, ctx),
            torchrun=_torchrun_options if self.passes_on else None,
            elsewhere=elsewhere,
            script=_runs_a_script(self),
        )


class LaunchCommand(Command):
    """A verb that starts processes by torchrun's launcher, and takes its options."""

    passes_on = True


def torchrun_words(context: Any) -> list[str]:
    """The words of a `LaunchCommand` that are torchrun's options."""
    return list(context.meta.get(_TORCHRUN, []))


def _torchrun_options() -> dict[str, Option]:
    from paceline.runtimes.real.launch import torchrun_options

    # What torchrun does with repeats is its own matter.
    return {
        name: Option(name, words, repeats=True)
        for name, words in torchrun_options().items()
    }


def _runs_a_script(command: TyperCommand) -> bool:
    return any(parameter.name == "script" for parameter in command.params)


def _options(command: TyperCommand, ctx: Any) -> dict[str, Option]:
    found = {}
    for parameter in command.get_params(ctx):
        if parameter.param_type_name != "option":
            continue
        takes = 0 if getattr(parameter, "is_flag", False) else parameter.nargs
        option = Option(
            str(parameter.name), takes, bool(getattr(parameter, "multiple", False))
        )
        for name in (*parameter.opts, *parameter.secondary_opts):
            found[name] = option
    return found
