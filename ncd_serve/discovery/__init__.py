"""New categories in a batch of images, and names that go from one model to the next."""
