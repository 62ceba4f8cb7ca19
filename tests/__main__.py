"""pytest with the suite's exit statuses: `python -m tests [pytest arguments]`.

An option that pytest does not know ends it with a status of its own before the suite has a say.
"""

from __future__ import annotations

import sys

import pytest

from .gpu_paths import joined, suite_status

if __name__ == "__main__":
    sys.exit(suite_status(pytest.main(joined(sys.argv[1:]))))
