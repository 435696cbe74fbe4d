"""Every interpreter that finds this on its path imports it when it starts."""

import os

if os.environ.get("COVERAGE_FOLDER"):
    from tests.support.measuring import begin

    begin()
