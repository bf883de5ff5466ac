import uuid
from collections.abc import Iterator

import pytest

from tests.distributed.sockets import MARK, left_over


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """Mark every process that is started here, and have none of them left at the end."""
    value = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, value)
        yield value
        assert left_over(value) == []
