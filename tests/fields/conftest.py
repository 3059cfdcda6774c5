"""Random networks for the tests of fields."""

from field_problems import make as make
