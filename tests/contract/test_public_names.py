import ncd_serve


def test_the_public_surface() -> None:
    assert ncd_serve.__all__ == sorted(ncd_serve.__all__)
    assert all(getattr(ncd_serve, name) is not None for name in ncd_serve.__all__)
