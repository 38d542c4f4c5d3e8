"""The gallery as a live page: names and corrections are applied, images answered, models trained and served."""
