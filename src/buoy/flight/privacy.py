"""Keeps secrets out of the log: what has the form of a token, what is named like a password, a URL with credentials.

The forms below were written down from what the providers publish about their tokens, and compared with the rules of
gitleaks (MIT licence, config/gitleaks.toml of 2026-07-22, commit b58d3f1): whatever its rules know by its beginning is
here. What its rules know by the name of a service alone (101 of 222) is left to the names below.
Nothing of a long text but its two ends is looked at, and each sign of those only a few times.
"""

from __future__ import annotations

import re
from functools import cache

MASK = "***"
_MOST = 4096
"""Of a text's beginning and of its end: whatever shows it cuts it shorter."""

# The beginning of a token, and how many signs follow it at least.
_PREFIXES = """
hf_ 8  api_org_ 20  sk- 16  sk_live_ 8  sk_test_ 8  sk_prod_ 8  rk_live_ 8  rk_test_ 8  rk_prod_ 8  whsec_ 16
ghp_ 12  gho_ 12  ghu_ 12  ghs_ 12  ghr_ 12  github_pat_ 12  glpat- 12  gldt- 12  glrt- 12  glcbt- 12  glptt- 12
glft- 12  glsoat- 12  glagent- 12  gloas- 12  glffct- 12  glimt- 12  GR1348941 12  xoxb- 8  xoxp- 8  xoxa- 8
xoxr- 8  xoxe- 8  xoxe. 8  xoxs- 8  xoxo- 8  xapp- 8  AKIA 12  ASIA 12  ABIA 12  ACCA 12  A3T 16  ABSK 40  AIza 20
ya29. 8  GOCSPX- 12  eyJ 12  dapi 24  npm_ 12  pypi- 16  rubygems_ 16  dckr_pat_ 12  nvapi- 16  wandb_v1_ 16
KGAT_ 16  r8_ 20  gsk_ 16  xai- 16  pplx- 16  lsv2_ 16  tvly- 12  SG. 16  key- 32  xkeysib- 16  PMAK- 16  hvs. 16
hvb. 16  ATATT3 16  ATCTT3 16  dop_v1_ 16  doo_v1_ 16  dor_v1_ 16  shpat_ 16  shpca_ 16  shppa_ 16  shpss_ 16
sq0atp- 16  sq0csp- 16  EAAA 20  EAAC 40  EAAM 40  pul- 16  ntn_ 16  secret_ 32  lin_api_ 16  figd_ 16  sntrys_ 16
sntryu_ 16  glsa_ 16  glc_ 16  ops_eyJ 16  tfp_ 16  LTAI 16  AQVN 16  AGE-SECRET-KEY-1 16  dp.pt. 16  dt0c01. 16
pscale_tkn_ 16  pscale_pw_ 16  pscale_oauth_ 16  HRKU- 16  sgp_ 16  rdme_ 16  duffel_live_ 16  duffel_test_ 16
shippo_live_ 16  shippo_test_ 16  FLWSECK 12  FLWPUBK 12  pnu_ 16  fio-u- 16  EZAK 16  EZTK 16  sm_aat_ 8  sm_pat_ 8
sm_sat_ 8  tk-us- 16  fo1_ 16  fm1a_ 16  fm1r_ 16  fm2_ 16  AKCp 40  cmVmd 40  p8e- 16  CLOJARS_ 16  clojars_ 16
sha256~ 24  API- 24  ico- 24  4b1d 36  pat. 40  sat. 40  NRAK- 16  A3- 20  bedrock-api-key- 12  pat 70  SK 32
NRJS- 12  NRII- 16  access-production- 16  sl. 100  ZXlK 40  s-s4t2 24  bkua_ 16  fig_ 30
"""
_WORDS = ("sk-", "key-", "secret_", "API-", "ico-", "pat.", "sat.", "sl.", "xai-", "fig_")
"""Beginnings that names have too."""
_WEBHOOKS = (
    "hooks.slack.com/",
    "discord.com/api/webhooks/",
    "discordapp.com/api/webhooks/",
    ".webhook.office.com/webhookb2/",
    "api.telegram.org/bot",
)
"""What follows is all that one needs to write there."""

_STRONG = ("secret", "passw", "passphrase", "pwd", "apikey", "api_key", "access_key", "private_key", "account_key",
           "credential", "cookie", "authorization")  # fmt: skip
_USUAL = ("token", "auth", "bearer")
_USUAL_WORDS = frozenset(("key", "pass", "sig", "signature", "sas"))
_NO_SECRETS = ("tokenizer", "tokens", "author", "tokenize", "authority")
_KINDS_OF_KEY = ("api ", "access ", "secret ", "private ", "auth ", "bearer ")
_SCHEMES = "Bearer|Basic|Token|ApiKey|Digest|Negotiate"
_PLAIN_COMMANDS = frozenset(("mkdir", "cp", "mv", "rsync", "tar", "install", "rmdir", "touch", "scp"))
"""Here `-p` is no password."""


def mask_arguments(arguments: list[str]) -> list[str]:
    """The command line with its secrets replaced.

    >>> mask_arguments(["train.py", "--hf-token", "abc", "--key=1", "s3://user:pw@host/x", "--keep", "3"])
    ['train.py', '--hf-token', '***', '--key=***', 's3://***@host/x', '--keep', '3']
    """
    masked = _mask_words(arguments)
    return [
        word if word is not argument else _mask_whole(_ends(argument))
        for word, argument in zip(masked, arguments, strict=True)
    ]


def mask_text(text: str) -> str:
    """A sentence with its secrets replaced: credentials in URLs, token forms, `name=secret`, `Bearer x`.

    >>> mask_text("Authorization: Bearer abc"), mask_text("run with --api-key abc, please")
    ('Authorization: Bearer ***', 'run with --api-key ***, please')
    """
    text = _ends(text)
    return _mask_whole(" ".join(_mask_words(text.split(" "))))


def mask_code(line: str) -> str:
    """A line of a user's code with its secrets replaced: what is quoted as one, and what has the form of one.

    >>> mask_code('login("hunter2"); wandb.login(key = "x"); load("cats.csv"); max(rows, key=len)')
    'login("***"); wandb.login(key = "***"); load("cats.csv"); max(rows, key=len)'
    >>> mask_code('connect("0123456789abcdef0123456789abcdef", timeout=3)')
    'connect("***", timeout=3)'
    """
    line = _ends(line)
    if line.lstrip().startswith(("!", "%")):  # a shell's line
        return mask_text(line)
    line = _pattern("called").sub(_called, _pattern("opaque").sub(MASK, line))
    return _mask_whole(line, code=True)


def _ends(text: str) -> str:
    """The beginning and the end of what is very long. A word that the end begins within could be half a token."""
    if len(text) <= 2 * _MOST:
        return text
    return f"{text[:_MOST]} ... {text[-_MOST:].partition(' ')[2]}"


def _mask_whole(text: str, code: bool = False) -> str:
    """What can be seen wherever it stands."""
    if "PRIVATE KEY" in text:
        text = _pattern("private key").sub(MASK, text)
    if "://" in text:
        text = _pattern("credentials").sub(MASK, text)
    for place in _WEBHOOKS:
        if place in text:
            text = re.sub(re.escape(place) + r"[^\s\"'<>]{8,}", place + MASK, text)
    return _mask_tokens(_mask_named(text, code))


def _mask_words(words: list[str]) -> list[str]:
    """What is seen by the word before it: `--token abc`, `Bearer abc`, `wandb login abc`, `-p abc`, `-u me:abc`."""
    masked: list[str] = []
    before, command, logs_in = "", "", 0
    for word in words:
        bare = word.strip("'\"(),;:`!%")
        logs_in -= 1
        if not bare or bare == MASK:
            masked.append(word)
            continue
        if _is_secret_after(bare, before, command) or (logs_in >= 0 and _is_opaque(bare)):
            word = word.replace(
                bare, f"{bare.partition(':')[0]}:{MASK}" if before in ("-u", "--user") else MASK
            )
        masked.append(word)
        before = bare
        if not bare.startswith("-"):
            command = bare if bare in _PLAIN_COMMANDS else "" if bare in ("&&", "||", "|") else command
        if bare.lower().endswith("login"):
            logs_in = 5
    return masked


def _is_secret_after(bare: str, before: str, command: str) -> bool:
    if before.lower() == "bearer":
        return True
    if before.lower() in ("basic", "digest", "negotiate"):
        return _is_basic(bare)
    if bare.startswith("-"):
        return False
    if before == "-p":
        is_plain = command in _PLAIN_COMMANDS or "/" in bare or not re.search(r"[^\d.:,x-]", bare)
        return not is_plain
    if before in ("-u", "--user"):
        return not (bare.partition(":")[2] or "0").isdigit()
    # `--token abc`; in `--token=abc` the value stands with its name, and `--no-auth` has none
    return before.startswith("-") and "=" not in before and before[:5] != "--no-" and _strength(before) > 0


def _mask_named(text: str, code: bool) -> str:
    """`name=value`, `name: value`, `"name": "value"`, `password 'value'`."""
    if not _pattern("hint").search(text):
        return text
    done, at, pieces = 0, 0, []
    while (found := _pattern("name").search(text, at)) is not None:
        at = found.end("name")  # what is no secret may hold one
        span = _secret_after(text, found, code)
        if span is not None:
            pieces += [text[done : span[0]], MASK]
            done = at = span[1]
    return "".join([*pieces, text[done:]])


def _secret_after(text: str, found: re.Match[str], code: bool) -> tuple[int, int] | None:
    """From where to where the secret stands that this name stands for; None where it stands for none."""
    strength = _strength(found["name"])
    if not strength:
        return None
    if text[max(0, found.start() - 8) : found.start()].lower().endswith(_KINDS_OF_KEY):
        strength = 2
    between = found["between"]
    sign = between.strip("\\\"'])( \t")[:1]
    is_key = between[0] in "'\"\\]"  # the name is quoted itself: a key, not a word of a sentence
    if code and sign == ":" and (annotated := _pattern("annotation").match(text, found.end())) is not None:
        start, sign = annotated.end(), "="
    else:
        start = found.end()
    value = _pattern("value").match(text, start)
    if value is None:
        return None
    if value["tuple"]:
        return value.span("tuple") if sign == "=" else None
    if value["quote"]:
        is_secret = (
            sign == "=" or is_key or strength > 1 or (sign == ":" and code) or _is_opaque(value["quoted"])
        )
        return value.span("quoted") if is_secret and value["quoted"] else None
    # A word that follows in a sentence (`password incorrect`), an expression in code: no secret by itself.
    in_url = text[max(0, found.start() - 1) : found.start()] in ("?", "&", ";") and sign == "="
    is_secret = in_url or (not code and (sign == "=" or (sign == ":" and (strength > 1 or is_key))))
    if sign in ("", ",") or not (is_secret or _is_opaque(value["plain"])):
        return None
    return value.start("plain"), _pattern("rest of a value").match(text, value.end()).end()  # type: ignore[union-attr]


def _called(found: re.Match[str]) -> str:
    name = found["name"].lower()
    is_secret = name.endswith("login") or _strength(name) > 0
    return found[0].removesuffix(found["quoted"]) + MASK if is_secret and found["quoted"] else found[0]


def _mask_tokens(text: str) -> str:
    """Runs of letters and digits that begin as tokens do."""
    done, at, pieces = 0, 0, []
    while (found := _pattern("run").search(text, at)) is not None:
        at = found.end()
        if _is_token(found[0]):
            pieces += [text[done : found.start()], MASK]
            done = at = _pattern("rest of a token").match(text, at).end()  # type: ignore[union-attr]
    return "".join([*pieces, text[done:]])


def _is_token(run: str) -> bool:
    beginnings, by_letters = _beginnings()
    if not run.startswith(beginnings):
        return "Q~" in run and len(run) >= 34  # a client's secret of Azure
    return any(
        run.startswith(prefix) and len(run) - len(prefix) >= least and _is_random(run[len(prefix) :], prefix)
        for prefix, least in by_letters.get(run[:2], ())
    )


def _is_random(rest: str, prefix: str) -> bool:
    """`hf_tokenizer` is a name: a token has capitals or digits, or is very long."""
    parts = re.split("[-_.]", rest)
    if prefix in _WORDS:  # `sk-learn-tutorial-2`: of a token's parts one is long and mixed
        return any(len(part) >= 8 and not part.isalpha() and not part.isdigit() for part in parts)
    if len(parts) > 1 and all(map(_is_word, parts)):  # `ASIA_PACIFIC_REGION`
        return False
    if rest.isalpha() and (rest.islower() or rest.istitle()):
        return len(rest) >= 30
    return True


def _is_word(part: str) -> bool:
    if part.isdigit():
        return len(part) <= 4
    return not part or (
        len(part) <= 15 and part.isalpha() and (part.islower() or part.isupper() or part.istitle())
    )


def _is_opaque(value: str) -> bool:
    """Whether nobody can read it: 32 hexadecimal digits, or 20 signs with letters and digits among them."""
    if len(value) < 20 or not _pattern("opaque word").fullmatch(value):
        return False
    letters = sum(sign.isalpha() for sign in value)
    digits = sum(sign.isdigit() for sign in value)
    if "/" in value or "." in value:  # a path, a version: not without a long piece that is opaque itself
        return any(_is_opaque(piece) for piece in re.split(r"[/.]", value) if piece != value)
    return letters >= 4 and digits >= 3 and (value.isalnum() or max(map(len, re.split("[-_]", value))) >= 16)


def _is_basic(word: str) -> bool:
    """Whether it is `user:password` in base64, as browsers send it."""
    from binascii import Error, a2b_base64

    try:
        return ":" in a2b_base64(word + "=" * (-len(word) % 4)).decode()
    except (Error, ValueError):
        return False


def _strength(name: str) -> int:
    """How surely a name is that of a secret: 2, 1, or 0.

    `--key` and `--hf_key` are secrets, `--keep` and `--monkey` are not; `--tokenizer` is the commonest false alarm.
    """
    spread = (
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).lower().replace("-", "_").replace(".", "_")
    )
    if any(word in spread for word in _NO_SECRETS) and "authorization" not in spread:
        return 0
    if any(word in spread for word in _STRONG):
        return 2
    if any(word in spread for word in _USUAL) or _USUAL_WORDS.intersection(spread.split("_")):
        return 1
    return 0


@cache
def _beginnings() -> tuple[tuple[str, ...], dict[str, list[tuple[str, int]]]]:
    """All beginnings, and each with its least length by its first two letters."""
    words = _PREFIXES.split()
    found: dict[str, list[tuple[str, int]]] = {}
    for prefix, least in zip(words[::2], words[1::2], strict=True):
        found.setdefault(prefix[:2], []).append((prefix, int(least)))
    return tuple(words[::2]), found


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Compiled when it is first needed: most processes that load this mask nothing.

    Each can begin only where a word begins, and no part of one can take what the part after it could take: no text
    makes them look at a sign more than a few times.
    """
    quoted = rf"[rbfuRBFU]{{0,2}}(?P<quote>\\?[\"'])(?:(?i:{_SCHEMES})\s{{1,3}})?(?P<quoted>(?:(?!(?P=quote))[^\n])*+)"
    patterns = {
        "private key": r"-----BEGIN[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[^-]*+(?:-----END[A-Z0-9 ]{0,40}-----)?",
        "credentials": r"(?<=://)[^\s/'\"]{1,512}(?=@)",
        "run": r"[A-Za-z0-9][\w.~+-]{11,}+",
        "rest of a token": r"[\w.~+/=%-]*+",
        "opaque": (
            r"(?<=[\"'])(?:[0-9a-fA-F]{32,}+|(?=[^\"']*\d)(?=[^\"']*[a-z])(?=[^\"']*[A-Z])[A-Za-z0-9+/=]{24,}+)"
            r"(?=[\"']|$)"
        ),
        "opaque word": r"[\w+/=.~-]++",
        "called": r"(?<![\w.])(?P<name>[A-Za-z_][\w.]{0,60})(?P<between>\(\s{0,3})" + quoted,
        "hint": r"(?i)key|token|secret|pass|pwd|auth|bearer|cred|sig|cookie|sas",
        "name": (
            r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,80}+)"
            r"(?P<between>\\?[\"']?[\])]{0,2}\s{0,3}(?:=>|:=|=|:|,)\s{0,3}|\s(?=[\"']))"
        ),
        "annotation": r"[\w.\[\]| ]{1,40}=\s{0,3}",
        "value": (
            rf"\((?P<tuple>[\"'][^)\n]*+)|{quoted}"
            rf"|(?:(?i:{_SCHEMES})\s{{1,3}})?(?P<plain>[^\s\"'&,;)\]}}]{{1,400}}+)"
        ),
        "rest of a value": r"[^\s\"'&,;)\]}]*+",
    }  # fmt: skip
    return re.compile(patterns[name], re.ASCII)
