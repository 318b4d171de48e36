"""A page in the browser that shows what a trained model does with one photo and one text."""
