"""The catalogue of rates: networks of `rules/`, and their rates measured on weights set by hand."""

from papers.dead_directions.catalogue.cells import Cell, catalogue, compare
from papers.dead_directions.catalogue.probing import Measurement, ladder, probe

__all__ = ["Cell", "Measurement", "catalogue", "compare", "ladder", "probe"]
