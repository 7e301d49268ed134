"""The rules, one file each. Listed by code so that `--select` loads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module

from buoy.errors import UsageError
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

Find = Callable[[Facts, Target], Iterator[Finding]]

# code -> module; the module has RULE and find(facts, target).
MODULES = {
    "BY101": "undefined_name_late",
    "BY102": "undefined_name",
    "BY103": "later_cell",
    "BY201": "removed_api",
    "BY202": "save_suffix",
    "BY203": "checkpoint_callback",
    "BY204": "history_key",
    "BY205": "removed_argument",
    "BY206": "removed_data_api",
    "BY207": "removed_torch_api",
    "BY301": "allocation_over_memory",
    "BY302": "float64_images",
    "BY303": "images_in_list",
    "BY304": "loader_to_list",
    "BY307": "file_over_memory",
    "BY401": "kept_graph",
    "BY402": "kept_outputs",
    "BY403": "eval_with_gradients",
    "BY404": "stepped_graph",
    "BY407": "retry_in_handler",
    "BY501": "accumulation_index",
    "BY502": "accumulation_scale",
    "BY503": "accumulation_tail",
    "BY601": "image_cache",
    "BY602": "cache_order",
    "BY603": "shuffle_buffer",
    "BY604": "slices_copy",
    "BY605": "endless_epoch",
    "BY702": "ephemeral_checkpoint",
    "BY703": "unpruned_checkpoints",
    "BY704": "weights_only",
    "BY801": "models_in_loop",
    "BY961": "half_precision",
    "BY981": "syntax",
}


@cache
def rule(code: str) -> Rule:
    """What is known of a rule."""
    from buoy.lint import engine, ignores

    own = {item.code: item for item in (engine.INTERNAL, engine.UNREADABLE, ignores.RULE)}
    if code in own:
        return own[code]
    found: Rule = import_module(f"buoy.lint.rules.{MODULES[code]}").RULE
    return found


def all_codes() -> list[str]:
    """Every code there is, buoy's own included."""
    return sorted(["BY000", "BY001", "BY002", *MODULES])


def load(codes: set[str]) -> list[tuple[Rule, Find]]:
    """The chosen rules with their functions."""
    return [
        (rule(code), import_module(f"buoy.lint.rules.{MODULES[code]}").find)
        for code in MODULES
        if code in codes
    ]


def choose(select: list[str], ignore: list[str]) -> set[str]:
    """Codes from words: a code, the start of one (`BY4`), a rule's name, `default` or `all`."""
    wanted: set[str] = set()
    for word in select or ["default"]:
        wanted |= _known(word)
    for word in ignore:
        wanted -= _known(word)
    return wanted


def matching(word: str) -> set[str]:
    """The codes that a word stands for; none when it stands for nothing."""
    if word.lower() == "all":
        return set(all_codes())
    if word.lower() == "default":
        return {code for code in all_codes() if rule(code).default}
    if word.upper().startswith("BY") and len(word) > 2:
        return {code for code in all_codes() if code.startswith(word.upper())}
    return {code for code in all_codes() if rule(code).name == word}


def _known(word: str) -> set[str]:
    found = matching(word)
    if not found:
        from difflib import get_close_matches

        names = [*all_codes(), *(rule(code).name for code in all_codes())]
        near = get_close_matches(word, names, n=1)
        raise UsageError(
            "unknown rule",
            received=repr(word),
            expected="a code (`BY401`), the start of one (`BY4`), a name, `default` or `all`",
            hint=f"did you mean `{near[0]}`?" if near else "`buoy check --rules` lists them",
        )
    return found
