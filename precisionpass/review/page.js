// The page is whole without this: it only adds the search field and the two lists.
const filter = document.getElementById("filter");
const words = document.getElementById("words");
const kind = document.getElementById("kind");
const decision = document.getElementById("decision");
const found = document.getElementById("found");
const articles = [...document.querySelectorAll("article")];
const texts = articles.map((article) => article.textContent.toLowerCase());
const sections = [...document.querySelectorAll("[data-section]")];

function narrow() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  articles.forEach((article, position) => {
    const fits =
      (!kind.value || article.dataset.kind === kind.value) &&
      (!decision.value || article.dataset.decision === decision.value) &&
      wanted.every((word) => texts[position].includes(word));
    article.hidden = !fits;
    count += fits;
  });
  for (const section of sections) section.hidden = !section.querySelector("article:not([hidden])");
  const narrowed = wanted.length || kind.value || decision.value;
  found.textContent = narrowed ? `${count} of ${articles.length} groups` : "";
}

filter.hidden = articles.length < 2;
filter.addEventListener("input", narrow);
addEventListener("beforeprint", () => document.querySelectorAll("details.graph").forEach((one) => (one.open = true)));
