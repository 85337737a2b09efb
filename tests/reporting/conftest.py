"""One browser for all tests."""

import pytest
from browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()
