"""The clusters of a run in words."""

from __future__ import annotations

from pathlib import Path

from ncd_training.summary.tables import clusters_in_words

from tests.serve.small_gallery import make_run


def test_the_end_of_a_training_says_what_was_found(tmp_path: Path) -> None:
    text = clusters_in_words(make_run(tmp_path / "run"))
    # A cluster without images is none. Confidences fall evenly from 0.99 to 0.30, so their mean is 0.645.
    assert text.startswith("3 clusters of 12, 8, 4 images; mean confidence 0.6")
    assert text.endswith("; 0 unusual, 0 outliers")
