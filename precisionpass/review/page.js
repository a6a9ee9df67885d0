// The page is whole without this: it only adds the search field.
const form = document.getElementById("filter");
const words = document.getElementById("words");
const found = document.getElementById("found");
const articles = [...document.querySelectorAll("[data-filter]")];
const texts = articles.map((article) => article.textContent.toLowerCase());

function narrow() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  articles.forEach((article, position) => {
    const fits = wanted.every((word) => texts[position].includes(word));
    article.hidden = !fits;
    count += fits;
  });
  found.textContent = wanted.length ? `${count} of ${articles.length} groups` : "";
}

form.hidden = articles.length < 2;
form.addEventListener("submit", (event) => event.preventDefault());
words.addEventListener("input", narrow);
