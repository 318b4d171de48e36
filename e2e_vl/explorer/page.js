// An image that is pasted anywhere on the page is dropped on the hidden file `pasted`.
() => {
    document.addEventListener("paste", event => {
        const image = [...event.clipboardData.files].find(file => file.type.startsWith("image/"));
        if (!image) return;
        event.preventDefault();
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(image);
        const target = document.querySelector("#pasted button");
        target.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
    });
}
