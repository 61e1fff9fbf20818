import json
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from areal_lora.tasks.rewards import MAX_DIGITS, extract_answer, numeric_match, parse_number
from tests.support.paths import ROOT

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("+5", 5),
        ("-5", -5),
        ("− 5", -5),
        ("–5", -5),
        ("007", 7),
        ("1,234", 1234),
        ("1,234,567.25", Fraction(123456725, 100)),
        ("$1,234.50", Fraction(2469, 2)),
        ("$-3", -3),
        ("-$3", -3),
        ("- $ 3", -3),
        ("€ 20", 20),
        (r"\$18", 18),
        (r"1{,}000", 1000),
        (r"1\,000", 1000),
        ("50%", 50),
        (r"50\%", 50),
        ("12 apples", 12),
        ("12apples", 12),
        ("about 12 apples.", 12),
        ("5.", 5),
        (".5", Fraction(1, 2)),
        ("0.125", Fraction(1, 8)),
        ("1/2", Fraction(1, 2)),
        ("-1 / 2", Fraction(-1, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("x=5", 5),
        ("5 km2", 5),
        ("7 - 5", 7),
        ("7-5", 7),
        (r"\frac12", Fraction(1, 2)),
        (r"-\frac34", Fraction(-3, 4)),
        (r"\frac{12}5 + 1", Fraction(12, 5)),
        (r"\dfrac1{72}", Fraction(1, 72)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-2 \tfrac34", Fraction(-11, 4)),
        (r"30^\circ", 30),
        (r"30^{\circ}", 30),
        ("90^o", 90),
        (r"25^{\text{th}}", 25),
        ("25^{th}", 25),
        (r"5\text{ cm}^2", 5),
    ],
)
def test_numbers(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "H2O",
        "1,23",
        "1,2345",
        "10:30",
        "1.2.3",
        "1/0",
        r"\frac{1}{0}",
        "1e999",
        "1/2/3",
        "٣",
        "9" * (MAX_DIGITS + 1),
        "10^6",
        "2^{10}",
        "10 ^ {-3}",
        "2^n",
        r"1.2\times 10^5",
        r"5 \cdot 3",
        r"\frac123",
    ],
)
def test_not_numbers(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+1=2\n#### 2", 2),
        ("#### 7\nQ: next\n#### 8", 7),
        ("####1,000", 1000),
        ("#### $5.00", 5),
        (r"so \boxed{12}", 12),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{1} and \boxed{2}", 2),
        (r"\boxed {\text{about } 3} 4", 3),
        ("The answer is 4. I am 9 years old", 4),
        ("Answer: -4", -4),
        ("answer is 3\nno, the answer is 5", 5),
        ("we have 3 and 4 then 7-5 = 2 apples.", 2),
        ("no digits", None),
        (r"#### 1 \boxed{2} answer is 3", 1),
        (r"\boxed{2} answer is 3", 2),
        ("5 #### ", None),
        (r"5 \boxed{6", None),
        (r"5 \boxed{x}", None),
        ("5, the answer is unknown", None),
        (r"5 \boxed", None),
        ("#### 7 apples", 7),
        ("#### Step 1: add\n2+3=5\n#### Step 2: answer\nSo \\boxed{18}", 18),
        ("#### Step 1: add\n2+3=5\n\n#### Step 2: take\n20-2=18", 18),
        ("#### 1. Add\n2+3=5\n#### 2. **Take**\nThe answer is 18. Is 3 fine?", 18),
        ("#### **Solution**\n2+3=5\n#### 18", 18),
        ("#### Solution\n\\boxed{18}\n#### Remark 2", 18),
        ("####\n18", 18),
        ('<think>\nThe user wants the final answer after "####". 9*2=17.\n</think>\nShe makes $18.\n#### 18', 18),
        ("<think> #### 17 </think>\n#### 18", 18),
        ("<think> #### 17 </think>\nShe makes 18", 18),
        ("<think> #### 17", None),
        (r"<think> so \boxed{42}. Wait,", None),
        (r"<think> so \boxed{41}. </think> The final answer is $42$.", 42),
        (r"Let me <think> 1 </think> \boxed{2} <think> or \boxed{3}", 2),
        ("I write `#### answer`. 9*2=18\n#### 18", 18),
        ('Output the final answer after "####".\n9*2=18\n#### 18', 18),
        ("9*2=18\n#### The total is 18", 18),
        ("2+3=5\n#### Monday", None),
        ("#### 步骤 1\n2+3=5\n#### 步骤 2\n9*2=18", 18),
        (r"#### \frac{1}{2} of it", Fraction(1, 2)),
        ("#### -$5", -5),
        ("#### __Step 1__\n2\n#### __Step 2__\n2+3=5", 5),
        ("#### 5. So 3 are left\n2", 5),
        ("#### Total: 42\n\nCheck: 40 + 2 = 42, as 5 of them", 42),
        ("#### John has 42 apples left.\nLet me check with 10.", 42),
        ("#### 18. So she makes 18 dollars at 2 each.\nDone in 3 steps", 18),
        ("<think>So \\boxed{3}? Is the answer: 4?</think>\nThus\n#### USD 42", 42),
        ("The answer is below, and \\boxed{3} no more.\n#### pi/2", 2),
        ("a\n#### USD 42\n\n#### ", 42),
        ("#### Step 1: add\n2+3=5. The answer is 5.", 5),
        ("#### Solution\n2+3=5", 5),
    ],
)
def test_where_the_answer_is_looked_for(text, value):
    assert extract_answer(text) == value


def test_match_needs_the_same_number():
    assert numeric_match("it is 0.50", "#### 1/2") == 1.0
    assert numeric_match("it is 0.51", "#### 1/2") == 0.0
    assert numeric_match("", "#### 0") == 0.0
    with pytest.raises(ValueError, match="no number"):
        numeric_match("5", "#### five")


@settings(deadline=None)
@given(st.integers(-(10**20), 10**20), st.sampled_from(["{}", "{:,}", " {} ", "{}.", "{:,}.00", "{} eggs", "#{}"]))
def test_integers_round_trip(value, form):
    assert parse_number(form.format(value)) == value


@settings(deadline=None)
@given(st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=6))
def test_decimals_round_trip(value):
    assert parse_number(f"{value:f}") == Fraction(value)
    assert parse_number(f"{value:,f}") == Fraction(value)


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_fractions_round_trip(top, bottom):
    value = Fraction(top, bottom)
    assert parse_number(f"{top}/{bottom}") == value
    assert parse_number(rf"\frac{{{top}}}{{{bottom}}}") == value
    assert parse_number(rf"{bottom:,}\frac{{{abs(top)}}}{{{bottom}}}") == bottom + abs(value)
    assert extract_answer(rf"so $\boxed{{\frac{{{top}}}{{{bottom}}}}}$ holds in 12 cases") == value


@settings(deadline=None)
@given(st.fractions(-(10**20), 10**20, max_denominator=10**20), st.text(alphabet="abc .,\n", max_size=40))
def test_a_stated_answer_is_found_behind_any_text(value, text):
    assert extract_answer(f"{text} 41 \n#### {value.numerator}/{value.denominator}") == value


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_answered_without_an_exception(text):
    assert numeric_match(text, "#### 1") in (0.0, 1.0)


@settings(deadline=None)
@given(st.text(alphabet="0123456789,.-+/$ eE{}\\frac", max_size=80))
def test_any_number_like_text_is_answered_without_an_exception(text):
    value = extract_answer(text)
    assert value is None or isinstance(value, Fraction)


@pytest.mark.parametrize(
    "unit",
    [
        "9",
        "1,",
        "1 ",
        "-",
        "- ",
        "$ ",
        "$",
        "1/",
        "1e",
        ",111",
        "9,111",
        ".1",
        " ",
        "{",
        "answer ",
        "####",
        "####.",
        "####a\n",
        "#### 1. a",
        "#### \\",
        "</think>",
        r"\boxed{",
        r"\frac{1",
        r"1\frac",
        r"1\frac1",
        "1^",
        "<think>",
    ],
)
def test_time_is_linear_in_the_length(unit):
    text = "1" + unit * (400_000 // len(unit))
    began = time.process_time()
    extract_answer(text)
    parse_number(text)
    assert time.process_time() - began < 3.0  # a quadratic scan takes minutes


@pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason=f"no GSM8K files in {GSM8K}")
def test_every_gsm8k_gold_answer_parses_and_scores_one():
    rows = [json.loads(line) for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").open(encoding="utf-8")]
    assert len(rows) == 8792
    for row in rows:
        gold = row["answer"].rpartition("####")[2].strip()
        assert parse_number(gold) == Fraction(gold.replace(",", "").replace("$", "")), gold
        assert numeric_match(row["answer"], row["answer"]) == 1.0
        assert numeric_match(f"#### {gold} 1", row["answer"]) == 1.0
        assert numeric_match(f"#### {Fraction(gold.replace(',', '')) + 1}", row["answer"]) == 0.0
