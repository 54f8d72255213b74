from __future__ import annotations

import pytest

from ampdoctor.cli.plan_command import bytes_of
from ampdoctor.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4g", 4 * 10**9),
        ("512 MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("2ki", 2048),
        ("7", 7),
        ("7B", 7),
        ("1TB", 10**12),
    ],
)
def test_a_size_has_the_units_that_people_type(text, size):
    assert bytes_of("--bundle-max", text) == size


@pytest.mark.parametrize("text", ["", "GB", "4 elephants", "-1GB", "1e9", "4iB", "0", "0.1B", "nan", "inf"])
def test_what_is_no_size_is_a_sentence(text):
    with pytest.raises(UsageError, match="--bundle-max"):
        bytes_of("--bundle-max", text)
