import pytest

from ncd_serve.errors import MissingExtraError, needs_extra


def test_a_package_that_is_not_installed_names_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtraError, match="this needs package_of_nobody") as raised, needs_extra("ray"):
        import package_of_nobody  # type: ignore[import-not-found]  # noqa: F401
    assert raised.value.hint == "pip install 'ncd-serve[ray]'" and raised.value.exit_code == 6


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("ray"):
        import ncd_nothing  # type: ignore[import-not-found]  # noqa: F401
