"""HTML pages of files, runs and audits.

Owns the page: its data as JSON, and the scripts and styles of `assets/`, in one HTML file. Takes a file, a profile or
an audit; returns the text of a page. Never lowers or runs anything itself.
"""
