"""Reading finished and running sweeps: tables, plots, the HTML report."""
