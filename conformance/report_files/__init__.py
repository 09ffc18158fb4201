"""Reports of a run as files: HTML, Markdown, JUnit XML, JSON lines and Parquet, from its data."""

from kdtr.conformance.report_files.options import Reports, add_report_options, begin_reports
from kdtr.conformance.report_files.run import Excuse, Header, Run

__all__ = ["Excuse", "Header", "Reports", "Run", "add_report_options", "begin_reports"]
