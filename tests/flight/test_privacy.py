"""What a log and a card show of a person's own words: no token, wherever it stands in a line."""

from __future__ import annotations

import pytest

from buoy.flight.privacy import mask_code, mask_text


@pytest.mark.parametrize(
    "line",
    [
        'login("hf_AbCdEfGhIjKl0123SECRET")',
        "from huggingface_hub import login; login('hf_SECRETSECRETx')",
        'login(SECRET) if 0 else login("SECRET")'.replace("(SECRET)", "(None)"),
        'openai.api_key = "SECRET"',
        'wandb.login(key="SECRET")',
        'wandb.login(key = "SECRET", relogin=True)',
        'os.environ["WANDB_API_KEY"] = "SECRET"',
        'config = {"password": "SECRET", "user": "me"}',
        'client = Client("sk-proj-1SECRETSECRETSECRET")',
        "boto3.client('s3', 'AKIASECRETSECRET1234', 'SECRETwJalrXUtnFEMI/K7MDENG1bPxRfiCY')",
        'notify("0123456789abcdef0123456789abcdef5EC2E7")'.replace("5EC2E7", "") + '; set_token("SECRET")',
        'requests.get(url, headers={"Authorization": "Bearer SECRET"})',
        "!git clone https://me:SECRET@github.com/me/private",
        "!huggingface-cli login --token SECRET",
        'password = "SECRET that is cut off before its end',
    ],
)
def test_no_secret_of_a_line_of_code_is_left(line: str) -> None:
    masked = mask_code(line)

    assert "SECRET" not in masked
    assert "0123456789abcdef" not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "line",
    [
        'model = AutoModel.from_pretrained("bert-base-uncased")',
        "hf_tokenizer = make(hf_model_name)",
        'tokenizer("a sentence", max_new_tokens=20)',
        "for epoch in run.epochs(10):",
        'data = load("images/2024/train-00012.parquet", batch_size=8)',
        "from sklearn import linear_model; risk-free = 3",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)",
    ],
)
def test_ordinary_code_is_left_as_it_is(line: str) -> None:
    assert mask_code(line) == line


def test_a_token_inside_a_word_is_masked_in_any_message() -> None:
    message = (
        "HTTPError: 401 for header({'token':'hf_AbCdEfGhIjKl0123'}), commit 7a0ec47d74bdbdfced26d909b528114"
    )

    masked = mask_text(message)

    assert "hf_" not in masked
    assert "7a0ec47d74bdbdfced26d909b528114" in masked  # an error's own numbers stay
