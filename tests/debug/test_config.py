import runpy
from pathlib import Path

import pytest

from hdtensor import _config
from hdtensor._config import VARIABLES, read_config, table
from hdtensor.errors import ConfigError


DOCS = Path(__file__).resolve().parents[2] / "docs" / "debugging.md"


def test_defaults_and_values():
    assert read_config({}) == read_config({"HDTENSOR_DEBUG": "", "PATH": "x"})
    assert read_config({}).debug == 0
    found = read_config({"HDTENSOR_DEBUG": " 2 ", "HDTENSOR_DEBUG_SECONDS": "1.5"})
    assert (found.debug, found.debug_seconds) == (2, 1.5)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HDTENSOR_DEBUG": "yes"}, r"HDTENSOR_DEBUG='yes', which must be 0, 1, 2"),
        ({"HDTENSOR_DEBUG": "-1"}, r"which must be 0, 1, 2.*unset it for 0"),
        ({"HDTENSOR_DEBUG_SECONDS": "0"}, r"which must be a number > 0"),
        ({"HDTENSOR_DEBUG_SECONDS": "nan"}, r"which must be a number > 0"),
        ({"HDTENSOR_DEBUG_SECONDS": "inf"}, r"which must be a number > 0"),
        ({"HDTENSOR_DEBGU": "1"}, r"HDTENSOR_DEBGU='1'.*Did you mean HDTENSOR_DEBUG\?"),
        ({"HDTENSOR_X": "1"}, r"does not know\..* Its variables are HDTENSOR_DEBUG, "),
    ],
)
def test_what_is_no_value_or_no_variable_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_config(environ)


def test_variables_of_the_tests_are_left_alone():
    assert read_config({"HDTENSOR_TEST_EXAMPLES": "3"}) == read_config({})


def test_the_documentation_shows_the_table():
    assert table() in DOCS.read_text(encoding="utf-8")
    assert all(v.name in table() for v in VARIABLES)


def test_the_environment_is_read_at_import(monkeypatch):
    monkeypatch.setenv("HDTENSOR_DEBUG", "2")
    assert runpy.run_path(_config.__file__)["CONFIG"].debug == 2
    monkeypatch.setenv("HDTENSOR_DEBUG", "on")
    with pytest.raises(ConfigError, match="HDTENSOR_DEBUG='on'"):
        runpy.run_path(_config.__file__)
