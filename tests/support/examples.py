"""How many examples hypothesis tries."""

import hypothesis


def examples(default: int, long: int) -> hypothesis.settings:
    """Return settings with `default` examples, or with `long` of them where the tests run with --long."""
    is_long = hypothesis.settings.get_current_profile_name() == "long-run"
    return hypothesis.settings(max_examples=long if is_long else default)
