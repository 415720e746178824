"""Statistics of the data of many sites: what is asked, how exact sums answer it, and what may be shown.

sums.py        a site's counts and sums, and how their sum over sites is read
survey.py      the questions, each made of the answers to those before, without I/O
small.py       which counts must not be shown
report.py      the statistics as a table, as HTML and as JSON
"""

from .report import ColumnStatistics, Histogram, Statistics

__all__ = ["ColumnStatistics", "Histogram", "Statistics"]
