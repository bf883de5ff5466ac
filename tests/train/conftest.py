from tests.families.conftest import one_thread  # noqa: F401 (a fixture that every test uses)
