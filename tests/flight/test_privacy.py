"""What a log and a card show of a person's own words: no token, wherever it stands in a line."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from buoy.flight.last_words import describe
from buoy.flight.privacy import mask_arguments, mask_code, mask_text
from buoy.supervisor.watch import _first_line

HEX = "0123456789abcdef0123456789abcdef01234567"
BASIC = "dXNlcjpodW50ZXIy"  # user:hunter2

CODE = [
    'login("hf_AbCdEfGhIjKl0123SECRET")',
    "from huggingface_hub import login; login('hf_SECRETSECRETx')",
    'login(None) if 0 else login("SECRET")',
    'openai.api_key = "SECRET"',
    'wandb.login(key="SECRET")',
    'wandb.login(key = "SECRET", relogin=True)',
    'os.environ["WANDB_API_KEY"] = "SECRET"',
    'os.environ.setdefault("HF_TOKEN", "SECRET")',
    'config = {"password": "SECRET", "user": "me"}',
    'config = dict(api_key="SECRET", lr=1)',
    'kaggle = {"username": "me", "key": "SECRET"}',
    "headers = {'X-Api-Key': 'SECRET'}",
    'client = Client("sk-proj-1SECRETSECRETSECRET")',
    'stripe.api_key = "sk_live_SECRET4eC39Hq"',
    'stripe = Client("sk_live_SECRET4eC39HqL")',
    f'db = connect("dapi{HEX[:32]}")',
    'credentials = Credentials("ya29.a0AfH6SMBSECRET_x")',
    'replicate = "r8_SECRETabcdefghijklm0123456789"',
    'key = "nvapi-SECRET0123456789abcdef"',
    'jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJTRUNSRVQifQ.SECRET0"',
    "boto3.client('s3', 'AKIASECRETSECRET1234', 'SECRETwJalrXUtnFEMI/K7MDENG1bPxRfiCY')",
    'notify("0123456789abcdef0123456789abcdef"); set_token("SECRET")',
    'requests.get(url, headers={"Authorization": "Bearer SECRET"})',
    "requests.get(url, auth=('me', 'SECRET'))",
    'requests.get("https://x/y?sig=SECRET%2Babc&se=2024")',
    'pd.read_csv("https://b.s3.amazonaws.com/k?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET")',
    'post("https://hooks.slack.com/services/T0SECRET/B0SECRET/SECRETSECRET")',
    'post("https://discord.com/api/webhooks/123/SECRETSECRET")',
    'bot("https://api.telegram.org/bot12345:SECRETabc/send")',
    'blob = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=SECRETabc==;EndpointSuffix=x"',
    'connection = "postgresql://me:SECRET@host/db"',
    'token: str = "SECRET"',
    "!git clone https://me:SECRET@github.com/me/private",
    "!git clone https://ghp_SECRETabcdefgh0123456789@github.com/x/y",
    "!huggingface-cli login --token SECRET",
    f"!wandb login {HEX}",
    f"!wandb login --relogin {HEX}",
    "%env HF_TOKEN=SECRET",
    "!export WANDB_API_KEY=SECRET && python x.py",
    "!mysql -u root -p SECRET db",
    "!docker login -u me -p SECRET registry",
    "!curl -u me:SECRET https://x",
    f'!curl -H "Authorization: Basic {BASIC}" https://x',
    """!python train.py --config '{"token": "SECRET"}'""",
    "!npm config set //registry/:_authToken npm_SECRETabcdefghijkl0123456789",
    'password = "SECRET that is cut off before its end',
]
MESSAGES = [
    f"Invalid API key: {HEX}",
    "Invalid API key: SECRET",
    "Incorrect API key provided: sk-SECRET0abcdefghijklmn. Find yours at",
    "Access denied for user 'me' using password 'SECRET'",
    "HTTPError 403 for https://x/y?sig=SECRET&x=1",
    f"401 for header({{'Authorization': 'Basic {BASIC}'}})",
    f"Authorization: Basic {BASIC}",
    "authorization: token SECRET",
    "bad token=SECRET",
    "{'password': 'SECRET'}",
    'config {\\"token\\": \\"SECRET\\"}',
    "Bearer SECRET",
    "client_secret=SECRET, clientSecret: SECRET",
    "SharedAccessSignature=SECRET",
    "Cookie: sessionid=SECRET",
    "redis://:SECRET@host:6379 refused",
    "mongodb://me:p@SECRET@host/db refused",
    "cannot post to https://hooks.slack.com/services/T/B/SECRETxyz",
    "-----BEGIN RSA PRIVATE KEY-----\nSECRET\n-----END RSA PRIVATE KEY-----",
    "key AKIASECRETSECRET1234 is not valid",
    "xoxb-123456789012-SECRETabc, glpat-SECRETabcdefg01234, pypi-SECRETAgEIcHlwaS5vcmc0",
]
COMMANDS = [
    ["wandb", "login", HEX],
    ["train.py", "-p", "SECRET"],
    ["train.py", "--password", "SECRET"],
    ["train.py", "--config", '{"token": "SECRET"}'],
    ["train.py", "--url", "https://x?sig=SECRET"],
    ["train.py", "--wandb-key=SECRET"],
    ["train.py", "--header", "Authorization: Bearer SECRET"],
    ["train.py", "hf_AbCdEfGhIjKl0123SECRET"],
    ["HF_TOKEN=SECRET", "python", "train.py"],
]


@pytest.mark.parametrize("line", CODE)
def test_no_secret_of_a_line_of_code_is_left(line: str) -> None:
    _expect_masked(mask_code(line))


@pytest.mark.parametrize("message", MESSAGES)
def test_no_secret_of_a_message_is_left(message: str) -> None:
    _expect_masked(mask_text(message))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_secret_of_a_command_line_is_left(command: list[str]) -> None:
    _expect_masked(" ".join(mask_arguments(command)))


def _expect_masked(masked: str) -> None:
    assert "SECRET" not in masked
    assert "0123456789abcdef" not in masked
    assert BASIC not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "line",
    [
        'model = AutoModel.from_pretrained("bert-base-uncased")',
        "hf_tokenizer = make(hf_model_name)",
        'tokenizer("a sentence", max_new_tokens=20)',
        "tokenizer.pad_token = tokenizer.eos_token",
        'token = os.environ["HF_TOKEN"]',
        'load_dataset("me/data", token=True)',
        "for epoch in run.epochs(10):",
        'data = load("images/2024/train-00012.parquet", batch_size=8)',
        "from sklearn import linear_model; risk-free = 3",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)",
        "rows.sort(key=lambda row: row[0]); best = max(scores, key=scores.get)",
        'x = frame["key"]; d = {"key": value}',
        "key_padding_mask = mask",
        "password = getpass()",
        "signature = inspect.signature(f)",
        'wandb.init(project="cats", name="run-2024-05-01")',
        "region = ASIA_PACIFIC_REGION",
        "!wandb login",
        "!mkdir -p checkpoints data/train",
        "!cp -p a.txt b.txt",
        "!docker run -p 8080:8080 image",
        "!python train.py -p 8080 --epochs 3",
        "!pip install -q transformers==4.40.1",
        "!git checkout 7a0ec47d74bdbdfced26d909b528114c0ffee123",
        "%cd /content/repo",
    ],
)
def test_ordinary_code_is_left_as_it_is(line: str) -> None:
    assert mask_code(line) == line


@pytest.mark.parametrize(
    "message",
    [
        "commit 7a0ec47d74bdbdfced26d909b528114 is bad",
        "checkpoint /data/7a0ec47d74bdbdfced26d909b528114c0ffee123/model.pt is missing",
        "KeyError: 'token'",
        "Unexpected token '<' in JSON at position 0",
        "unknown token '[PAD]' in the vocabulary",
        "password incorrect",
        "authentication failed for user me",
        "tensor key 'model.layers.0.weight' not found",
        "key: 5, signature: (x, y), max_tokens=20, tokenizer=gpt2, the author: Jane",
        "a basic understanding of https://host/path?page=2",
        "sk-learn-contrib-package is missing",
        "No module named 'hf_transfer'",
        "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x1)",
        "segfault at 18 ip 00007f1234567890 error 4 in libtorch_cpu.so[7f12]",
    ],
)
def test_ordinary_messages_are_left_as_they_are(message: str) -> None:
    assert mask_text(message) == message


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "-p", "8080", "--keep", "3", "--tokenizer", "gpt2"],
        ["python", "-u", "train.py", "-p", "out/dir", "--no-auth", "cats"],
        ["python", "train.py", "--run", "a/7a0ec47d74bdbdfced26d909b528114c0ffee123"],
        [
            "python3",
            "-m",
            "ipykernel_launcher",
            "-f",
            "/home/me/kernel-0d3f2a1b-1234-4abc-9def-0123456789ab.json",
        ],
    ],
    ids=" ".join,
)
def test_ordinary_commands_are_left_as_they_are(command: list[str]) -> None:
    assert mask_arguments(command) == command


def test_a_token_inside_a_word_is_masked_in_any_message() -> None:
    message = (
        "HTTPError: 401 for header({'token':'hf_AbCdEfGhIjKl0123'}), commit 7a0ec47d74bdbdfced26d909b528114"
    )

    masked = mask_text(message)

    assert "hf_" not in masked
    assert "7a0ec47d74bdbdfced26d909b528114" in masked  # an error's own numbers stay


LONG = [
    "x" * 16_000, "token=" * 2_700, 'token="' * 2_300, "'\"" * 8_000, " " * 16_000, "a " * 8_000, "a." * 8_000,
    "sk-" * 5_300, "://a@" * 3_200, "key, " * 3_200, "key: " * 3_200, 'login("' * 2_300, "auth=(" * 2_700,
    "\\" * 16_000, "pass '" * 2_700, 'token="\n' * 2_000, "0123456789abcdef" * 1_000, "token: aaaa " * 1_300,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
@pytest.mark.parametrize("mask", [mask_text, mask_code])
def test_a_text_of_four_times_the_length_takes_about_four_times_as_long(
    mask: Callable[[str], str], text: str
) -> None:
    mask(text)  # patterns are compiled when they are first used

    # Where each sign is looked at again for each other one, it is sixteen times; beyond 8,000 a text is cut.
    assert _seconds(mask, text[:8_000]) < 9 * _seconds(mask, text[:2_000]) + 0.001


def _seconds(mask: Callable[[str], str], text: str) -> float:
    taken = []
    for _ in range(5):
        began = time.thread_time()
        mask(text)
        taken.append(time.thread_time() - began)
    return min(taken)


def test_a_secret_across_the_cut_is_not_left_in_half() -> None:
    for before in range(40, 130):
        line = _first_line(f"{'x' * before}; login('hf_AbCdEfGhIjKl0123SECRET{'s' * 900}')")
        assert "SECRET" not in line, before
        assert len(line) <= 120
    for length in (300, 340, 4_000, 4_080, 4_095, 4_100, 9_000):
        told = describe(ValueError(f"{'a ' * 6_000}hf_AbCdEfGhIjKl0123SECRET{'sECRET' * (length // 6)}"))
        assert "SECRET" not in str(told["message"]) and "sECRET" not in str(told["message"]), length
