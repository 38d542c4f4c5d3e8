"""One self-contained page of a model's clusters: to look at them and to name them."""

from ncd_serve.gallery.build import Gallery, build_gallery, make_gallery
from ncd_serve.gallery.collection import Collection
from ncd_serve.gallery.projection import MapKind
from ncd_serve.gallery.read import read_source

__all__ = ["Collection", "Gallery", "MapKind", "build_gallery", "make_gallery", "read_source"]
