"""A page in the browser that shows what a trained model does with one photo and one text.

What it computes (`session`), draws (`pictures`) and accepts (`uploads`) needs no gradio; `web_page` puts it on a page.
"""
