"""Examines modules, programs and graphs. Serves no calls.

check           `check`: tries if a module can be captured and padded
parts_to_break  finds the parts of a module that must be eager breaks, by trying them
audit           `audit`: checks the graphs of any code at replays
attach          finds the graphs that any code captures
owners          tells who owns memory at a moment
audit_page      the report of an audit as an HTML file
advise          `Advisor`: finds where graphs would help a program
call_sites      finds the user's line that makes a call
trials          tries graphs on copies of objects; the settings of trials
turns           times two variants in turns
advise_page     the advisor's report as an HTML file
explain         prints sections of the troubleshooting page, for the command line
page            the report of a wrapper as an HTML file
touches         the memory that kernels touch, by module
"""
