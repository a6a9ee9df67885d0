from precisionpass.decide import MESSAGES
from precisionpass.review.advice import ADVICE, advice
from precisionpass.sites.site import REASONS


def test_every_reason_has_its_advice():
    """A new reason code comes with a sentence in review/advice.py: what would have to change."""
    assert set(ADVICE) == set(REASONS) | set(MESSAGES) - {"rewritten"}
    assert all(sentence[0].islower() and sentence.endswith(".") for sentence in ADVICE.values())
    assert advice("rewritten") == advice("of another version") == ""
