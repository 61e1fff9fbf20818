import pytest

from areal_lora.tasks.tally import vote_of


@pytest.mark.parametrize(
    ("kind", "text", "vote"),
    [
        ("numeric_match", "She has 3.\n#### 1,200", "1200"),
        ("numeric_match", "so it is 0.5", "1/2"),
        ("numeric_match", "no idea", None),
        ("function", "step\n####  blue \nmore", "blue"),
        ("math_verify", r"thus \boxed{a} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("function", "<think> #### red </think> #### blue", "blue"),
        ("numeric_match", "#### Step 1: add\n2+3=5\n#### Step 2: take\nso 18", "18"),
        ("math_verify", "#### Step 1: add\n2+3=5\n#### 2. Take\nSo \\boxed{18}", "18"),
        ("math_verify", "#### Step 1: add\n2+3=5\n#### Step 2: take\nso $x$", "so $x$"),
        ("function", "a line\n last line \n", "last line"),
        ("function", "  \n", None),
        ("math_verify", r"\boxed{1", r"\boxed{1"),
    ],
)
def test_what_an_answer_votes_for(kind: str, text: str, vote: str | None) -> None:
    assert vote_of(kind, text) == vote
