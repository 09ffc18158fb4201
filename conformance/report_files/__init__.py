"""Reports of a run as files: HTML, Markdown, JUnit XML, JSON lines and Parquet, from its data."""

from kdtr.conformance.report_files.options import Reports, add_report_options, begin_reports
from kdtr.conformance.report_files.run import Header, Run

__all__ = ["Header", "Reports", "Run", "add_report_options", "begin_reports"]
