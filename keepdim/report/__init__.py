"""HTML pages of files, runs and audits.

Owns the page: what it shows as JSON, with the scripts and the style of `assets/` written into one file. Takes a file,
a profile or an audit; gives the text of a page. Never lowers or runs anything itself.
"""
