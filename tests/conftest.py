import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _pools():
    yield
    close_pools()
