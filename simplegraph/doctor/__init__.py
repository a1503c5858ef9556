"""Examines modules, programs and graphs. Serves no calls.

check        `check`: tries if a module can be captured and padded; `trial_config` has the settings of trials
audit        `audit`: checks the graphs of any code at replays; `attach`, `owners` and `audit_page` are its parts
parts_to_break  finds the parts of a module that must be eager breaks, by trying them
advise       `Advisor`: finds where graphs would help a program; `call_sites`, `trials`, `turns`, `advise_page` are its
             parts
explain      prints sections of the troubleshooting page, for the command line
page         the report as an HTML file
touches      the memory that kernels touch, by module
"""
