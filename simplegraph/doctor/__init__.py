"""Looks at modules and graphs. Serves no calls.

check        `check`: can a module be captured, and padded; `trial_config` are its settings, and those of advice
audit        `audit`: checks the graphs of others at replays; `attach`, `owners` and `audit_page` are its parts
parts_to_break  finds, by trying, the parts of a module that must break
advise       `Advisor`: finds where a program gains; `call_sites`, `trials`, `turns`, `advise_page` are its parts
explain      sections of the troubleshooting page, for the command line
page         the report as an HTML file
touches      what kernels touch, by module
"""
