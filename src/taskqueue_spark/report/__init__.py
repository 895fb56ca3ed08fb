"""The report: all tables of the pipeline as Parquet, one HTML page about them, and its content as JSON.

`build` creates the tables, `content` selects the rows for the page, `outcome` sums them up in sentences, and `page`
renders them with the plots of `plots`.
"""
