"""Keeps secrets out of the log: words that look like a token, key, password or a URL with credentials."""

from __future__ import annotations

import re

MASK = "***"
_SECRET_WORDS = ("token", "secret", "passw", "passwd", "pwd", "apikey", "api_key", "api-key", "access_key",
                 "access-key", "private_key", "private-key", "credential", "auth", "bearer")  # fmt: skip
_SECRET_PREFIXES = (
    "hf_",
    "sk-",
    "ghp_",
    "gho_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "AKIA",
    "ASIA",
    "AIza",
    "eyJ",
)
# In code a token stands between brackets and quotes. `hf_tokenizer` is a name: a token has capitals or digits.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{8,}|gh[opsu]_[A-Za-z0-9]{12,}|github_pat_\w{12,}"
    r"|glpat-[\w-]{12,}|xox[bp]-[\w-]{12,}|sk-(?=[\w-]*\d)[\w-]{12,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{10,}[\w.-]*)"
)
_QUOTED = r"""[rbfu]*(?P<quote>["'])(?P<value>.*?)(?:(?P=quote)|$)"""
_NAMED = re.compile(r"""(?P<name>[A-Za-z_][\w.-]*)(?P<between>["'\])]*\s*[=:,]\s*)""" + _QUOTED)
_CALLED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<between>\(\s*)" + _QUOTED)
_OPAQUE = re.compile(
    r"""(?<=["'])(?:[0-9a-fA-F]{32,}|(?=[^"']*\d)(?=[^"']*[a-z])(?=[^"']*[A-Z])[A-Za-z0-9+/=]{24,})(?=["'])"""
)


def mask_arguments(arguments: list[str]) -> list[str]:
    """The command line with its secrets replaced.

    >>> mask_arguments(["train.py", "--hf-token", "abc", "--key=1", "s3://user:pw@host/x", "--keep", "3"])
    ['train.py', '--hf-token', '***', '--key=***', 's3://***@host/x', '--keep', '3']
    """
    masked: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("-"):
            masked.append(MASK)
            hide_next = False
            continue
        hide_next = False
        name, equals, _ = argument.partition("=")
        if equals and _is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            hide_next = argument.startswith("-") and _is_secret_name(argument)
            masked.append(mask_text(argument))
    return masked


def mask_text(text: str) -> str:
    """One word or sentence with its secrets replaced: credentials in URLs, token shapes, `name=secret`, `Bearer x`.

    >>> mask_text("Authorization: Bearer abc"), mask_text("run with --api-key abc, please")
    ('Authorization: Bearer ***', 'run with --api-key *** please')
    """
    masked: list[str] = []
    hide_next = False
    for word in text.split(" "):
        masked.append(MASK if hide_next and word else _mask_word(word))
        # `Authorization: Bearer abc` and `--token abc` inside a sentence
        bare = word.strip("'\"(),;:`")
        hide_next = bare.lower() == "bearer" or (bare.startswith("-") and _is_secret_name(bare))
    return _TOKEN.sub(MASK, " ".join(masked))


def mask_code(line: str) -> str:
    """A line of a person's code with its secrets replaced: `mask_text`, and what is quoted as one.

    >>> mask_code('login("hunter2"); wandb.login(key = "x"); load("cats.csv")')
    'login("***"); wandb.login(key = "***"); load("cats.csv")'
    >>> mask_code('connect("0123456789abcdef0123456789abcdef", timeout=3)')
    'connect("***", timeout=3)'
    """

    def hidden(found: re.Match[str]) -> str:
        name = found["name"].lower()
        is_secret = _is_secret_name(name) or name.endswith("login")
        shown = found["name"] + found["between"] + found["quote"] + MASK + found["quote"]
        return shown if is_secret else found[0]

    line = _CALLED.sub(hidden, _NAMED.sub(hidden, line))
    return mask_text(_OPAQUE.sub(MASK, line))


def _mask_word(word: str) -> str:
    bare = word.strip("'\"(),;")
    if bare.startswith(_SECRET_PREFIXES) and len(bare) >= 16:
        return word.replace(bare, MASK)
    scheme, separator, rest = word.partition("://")
    if separator:
        authority, slash, path = rest.partition("/")
        if "@" in authority:
            authority = f"{MASK}@{authority.rpartition('@')[2]}"
        return f"{scheme}://{authority}{slash}{_mask_query(path)}"
    name, equals, value = word.partition("=")
    if equals and value and _is_secret_name(name):
        return f"{name}={MASK}"
    if equals and value.strip("'\"").startswith(_SECRET_PREFIXES):
        return f"{name}={MASK}"
    return word


def _mask_query(path: str) -> str:
    path, question, query = path.partition("?")
    return path + question + "&".join(_mask_word(pair) for pair in query.split("&"))


def _is_secret_name(name: str) -> bool:
    bare = name.lstrip("-").lower()
    # `--key` and `--hf_key` are secrets, `--keep` and `--monkey` are not; `--tokenizer` is the commonest false alarm.
    words = bare.replace("-", "_").replace(".", "_").split("_")
    if "key" in words or "pass" in words:
        return True
    return any(word in bare for word in _SECRET_WORDS) and "tokenizer" not in bare and not bare.endswith("tokens") \
        and "author" not in bare  # fmt: skip
