"""Data under `fit`: opened at any position, by what kind of data it is."""
