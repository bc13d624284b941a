"""Figures of the lessons: each function returns (figure, data) or draws on an Axes and returns the data."""
