"""The rules, one file for each family. Listed by code so that `--select` loads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from buoy.errors import UsageError
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target

Find = Callable[[Facts, Target], Iterator[Finding]]

# code -> family and name; the family's module has NAME (a Rule) and find_name(facts, target).
RULES = {
    "BY101": ("names", "undefined_name_late"),
    "BY102": ("names", "undefined_name"),
    "BY103": ("names", "later_cell"),
    "BY201": ("removed", "removed_api"),
    "BY202": ("checkpoints", "save_suffix"),
    "BY203": ("checkpoints", "checkpoint_callback"),
    "BY204": ("removed", "history_key"),
    "BY205": ("removed", "removed_argument"),
    "BY206": ("removed", "removed_data_api"),
    "BY207": ("removed", "removed_torch_api"),
    "BY301": ("memory", "allocation_over_memory"),
    "BY302": ("memory", "float64_images"),
    "BY303": ("memory", "images_in_list"),
    "BY304": ("memory", "loader_to_list"),
    "BY307": ("memory", "file_over_memory"),
    "BY401": ("graphs", "kept_graph"),
    "BY402": ("graphs", "kept_outputs"),
    "BY403": ("graphs", "eval_with_gradients"),
    "BY404": ("graphs", "stepped_graph"),
    "BY407": ("steps", "retry_in_handler"),
    "BY501": ("steps", "accumulation_index"),
    "BY502": ("steps", "accumulation_scale"),
    "BY503": ("steps", "accumulation_tail"),
    "BY601": ("memory", "image_cache"),
    "BY602": ("memory", "cache_order"),
    "BY603": ("memory", "shuffle_buffer"),
    "BY604": ("memory", "slices_copy"),
    "BY605": ("memory", "endless_epoch"),
    "BY702": ("checkpoints", "ephemeral_checkpoint"),
    "BY703": ("checkpoints", "unpruned_checkpoints"),
    "BY704": ("checkpoints", "weights_only"),
    "BY801": ("steps", "models_in_loop"),
    "BY961": ("steps", "half_precision"),
    "BY981": ("names", "syntax"),
}


@cache
def rule(code: str) -> Rule:
    """What is known of a rule."""
    from buoy.lint import engine, ignores

    own = {item.code: item for item in (engine.INTERNAL, engine.UNREADABLE, ignores.RULE)}
    if code in own:
        return own[code]
    found: Rule = getattr(_family(code), RULES[code][1].upper())
    return found


def _family(code: str) -> ModuleType:
    return import_module(f"buoy.lint.rules.{RULES[code][0]}")


def all_codes() -> list[str]:
    """Every code there is, buoy's own included."""
    return sorted(["BY000", "BY001", "BY002", *RULES])


def load(codes: set[str]) -> list[tuple[Rule, Find]]:
    """The chosen rules with their functions."""
    return [(rule(code), getattr(_family(code), f"find_{RULES[code][1]}")) for code in RULES if code in codes]


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
