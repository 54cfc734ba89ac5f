"""Separates the arguments of paceline, torchrun and the script.

================================================  ==========================================
``paceline VERB OPTIONS SCRIPT ARGUMENTS``        arguments are the script's, as with torchrun
``paceline VERB SCRIPT OPTIONS``                  options after the script are paceline's
``paceline VERB SCRIPT OPTIONS -- ARGUMENTS``     what stands after ``--`` is the script's
================================================  ==========================================

The rule is the same for every command that runs a script. Ambiguous arguments are refused, with a command that
gives all arguments after the script to the script. They are: options beside arguments of the script, options of
another command, and misspelt options. An option that is given twice is also refused.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

from paceline.errors import UsageError

_TORCHRUN = "paceline.torchrun"
_SIMILARITY = 0.85
"""Least similarity of a misspelt option: --wrkers is like --workers; --num-workers, which many
scripts have, is not."""


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        parameter: The parameter that it sets: two names of one parameter are one option.
        values: Number of values that follow it.
        repeats: Whether it may be given more than once.
    """

    parameter: str
    values: int
    repeats: bool = False


@dataclass(frozen=True)
class Grammar:
    """The options that a command accepts.

    Attributes:
        verb: The command's name.
        options: Its own options, by name.
        torchrun: Returns torchrun's options, if they are passed through. It imports torch, so it is
            called only for options that paceline does not have.
        other_verbs: Options of other commands, each with a command that has it.
        runs_script: Whether the command takes a script.
    """

    verb: str
    options: Mapping[str, Option]
    torchrun: Callable[[], Mapping[str, Option]] | None = None
    other_verbs: Mapping[str, str] = field(default_factory=dict)
    runs_script: bool = True

    def similar(self, word: str) -> str:
        """Return the option that *word* probably means; empty if there is none."""
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, list(self.options), 1, _SIMILARITY)
        return near[0] if near else ""

    def find(self, name: str) -> tuple[Option | None, bool]:
        """Return the option with that *name*, and whether it is torchrun's."""
        if name in self.options:
            return self.options[name], False
        is_option = name.startswith("-") and name != "-"
        if self.torchrun is None or not is_option or self.similar(name):
            return None, False
        return self.torchrun().get(name), True

    def is_suspicious(self, word: str) -> bool:
        """Return whether *word*, after the script, is probably meant for paceline."""
        name = word.partition("=")[0]
        if not name.startswith("--"):
            return False
        return name in self.other_verbs or bool(self.similar(name))


@dataclass
class Arguments:
    """The arguments of a command, separated by recipient."""

    own: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    script: str | None = None
    of_script: list[str] = field(default_factory=list)


def split_arguments(words: Sequence[str], grammar: Grammar) -> Arguments:
    """Split a command's *words*. Raises `UsageError` for refused arguments, see above."""
    dashes = words.index("--") if "--" in words else len(words)
    left, after = list(words[:dashes]), list(words[dashes + 1 :])
    found, given = Arguments(), dict[str, str]()
    options_follow = dashes < len(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        option, is_torchruns = grammar.find(name)
        if option is not None:
            if option.parameter in given and not option.repeats:
                raise UsageError(_twice(name, given[option.parameter], found.script))
            given[option.parameter] = name
            values = 0 if equals else option.values
            (found.torchrun if is_torchruns else found.own).extend(
                [word, *left[:values]]
            )
            del left[:values]
            options_follow = options_follow or found.script is not None
        elif found.script is not None:
            found.of_script.append(word)
        elif word.startswith("-"):
            raise UsageError(_unknown(name, grammar))
        else:
            found.script = word
            ahead = len(words[:dashes]) - len(left)
    suspects = [word for word in found.of_script if grammar.is_suspicious(word)]
    if suspects or (found.of_script and options_follow):
        names = [word for word in found.of_script if word.startswith("-")]
        word = [*suspects, *names, *found.of_script][0]
        if dashes < len(words) or word.partition("=")[0] in grammar.other_verbs:
            head = [*found.torchrun, *found.own, str(found.script)]
            tail = [*found.of_script, *after]
        else:
            head, tail = list(words[:ahead]), list(words[ahead:])
        raise UsageError(_ambiguous(word, words, [*head, "--", *tail], grammar))
    found.of_script += after
    return found


def _unknown(name: str, grammar: Grammar) -> str:
    text = f"unknown option {name!r} of paceline {grammar.verb}"
    near, verb = grammar.similar(name), grammar.other_verbs.get(name)
    if near:
        return f"{text}; did you mean {near!r}?"
    if verb:
        return f"{text}; paceline {verb} has it"
    if grammar.torchrun is not None:
        text += ": neither paceline's nor torchrun's"
    return text + "; a script's own options come after it" * grammar.runs_script


def _twice(name: str, first: str, script: str | None) -> str:
    same = "" if name == first else f", first as {first}"
    own = "; if it is the script's own, it stands after --" if script else ""
    return f"{name} is given twice{same}: give it once{own}"


def _ambiguous(
    word: str, words: Sequence[str], for_script: Sequence[str], grammar: Grammar
) -> str:
    """Why *word* is refused after the script. *for_script*: the command that gives it to the script."""
    name, equals, value = word.partition("=")
    command = f"    paceline {grammar.verb} "
    script_line = command + shlex.join(for_script)
    near = grammar.similar(word) if word.startswith("-") else ""
    if near:
        right = [near + equals + value if one == word else one for one in words]
        return (
            f"unknown option {name!r} of paceline {grammar.verb}; did you mean {near!r}?\n"
            f"{command}{shlex.join(right)}\n"
            f"If it is the script's own, it stands after --:\n{script_line}"
        )
    verb = grammar.other_verbs.get(name)
    if verb:
        return (
            f"{name!r} is no option of paceline {grammar.verb}, but one of paceline {verb}: leave "
            f"it out. If it is the script's own, it stands after --:\n{script_line}"
        )
    return (
        f"{name!r} is no option of paceline {grammar.verb}. The script's own arguments "
        f"stand after --, and paceline's options before the script:\n{script_line}"
    )


class Command(TyperCommand):
    """A command of paceline."""

    passes_on = False
    """Whether torchrun's options are passed through."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give click the command's own arguments, and store torchrun's."""
        if ctx.resilient_parsing:  # A shell completes an unfinished command.
            return super().parse_args(ctx, args)
        found = split_arguments(args, self._grammar(ctx))
        ctx.meta[_TORCHRUN] = found.torchrun
        if found.script is not None:
            rest = [found.script, *found.of_script]
            return super().parse_args(ctx, [*found.own, "--", *rest])
        wanted = any(p.required for p in self.params if p.name == "script")
        if wanted and not set(ctx.help_option_names).intersection(found.own):
            raise UsageError(
                f"expected a script: paceline {self.name} --workers 2 train.py"
            )
        return super().parse_args(ctx, found.own)

    def _grammar(self, ctx: Any) -> Grammar:
        other_verbs: dict[str, str] = {}
        verbs = {} if ctx.parent is None else ctx.parent.command.commands
        for name, command in verbs.items():
            if _runs_script(command):
                for option in _options(command, ctx):
                    other_verbs.setdefault(option, name)
        return Grammar(
            verb=str(self.name),
            options=_options(self, ctx),
            torchrun=_torchrun_options if self.passes_on else None,
            other_verbs=other_verbs,
            runs_script=_runs_script(self),
        )


class LaunchCommand(Command):
    """A command that starts processes by torchrun's launcher, and accepts torchrun's options."""

    passes_on = True


def torchrun_words(context: Any) -> list[str]:
    """Return the arguments of a `LaunchCommand` that are torchrun's."""
    return list(context.meta.get(_TORCHRUN, []))


def _torchrun_options() -> dict[str, Option]:
    from paceline.runtimes.real.launch import torchrun_options

    # Let torchrun judge repeated options.
    return {
        name: Option(name, values, repeats=True)
        for name, values in torchrun_options().items()
    }


def _runs_script(command: TyperCommand) -> bool:
    return any(parameter.name == "script" for parameter in command.params)


def _options(command: TyperCommand, ctx: Any) -> dict[str, Option]:
    found = {}
    for parameter in command.get_params(ctx):
        if parameter.param_type_name != "option":
            continue
        values = 0 if getattr(parameter, "is_flag", False) else parameter.nargs
        repeats = bool(getattr(parameter, "multiple", False))
        option = Option(str(parameter.name), values, repeats)
        for name in (*parameter.opts, *parameter.secondary_opts):
            found[name] = option
    return found
