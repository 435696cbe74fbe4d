"""Numbers of hypothesis examples."""

import hypothesis


def examples(default: int, long: int) -> hypothesis.settings:
    """Return settings with `default` examples, or with `long` of them under --long."""
    is_long = hypothesis.settings.get_current_profile_name() == "long-run"
    return hypothesis.settings(max_examples=long if is_long else default)
